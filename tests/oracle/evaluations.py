"""What a program evaluates: validation within the run, averaged weights, and a saved checkpoint."""

from __future__ import annotations

import copy

import torch

from oracle.dealing import deal_evaluation, deal_streams, stated_length
from oracle.outcome import Evaluated
from oracle.program import EVALUATED, Evaluation
from oracle.rank_states import RankStates, put_buffers


class Evaluations(RankStates):
    def validate_within(self, over: bool) -> None:
        validation = self.validation
        if validation is None or validation.interval is None or not self.due():
            return
        if self.batch_idx % self.interval() == 0:
            self.validate()

    def validate_at_the_end(self, cut: bool) -> None:
        wanted = self.validation.interval is None or cut or self.missed()
        if self.due() and wanted and self.validated_at != self.micro_batches:
            self.validate()

    def due(self) -> bool:
        return bool((self.epoch + 1) % self.validation.every_n_epochs == 0)

    def interval(self) -> int:
        interval, length = self.validation.interval, stated_length(self.program.data, self.world)
        if isinstance(interval, int):
            return interval
        return max(1, int((2**31 if length is None else length) * interval))  # None would be refused

    def missed(self) -> bool:
        """Return whether the data ended before a validation that the stated length had promised."""
        validation, length = self.validation, stated_length(self.program.data, self.world)
        if length is None or validation.interval is None:
            return False
        interval = self.interval()
        if isinstance(validation.interval, int):  # if there was none at all, their number depends on the data
            return self.batch_idx < interval <= length
        return (self.batch_idx // interval + 1) * interval <= length

    def validate(self) -> None:
        """Validate on all ranks with rank 0's buffers; training's own buffers, generators and modes are restored."""
        validation = self.validation
        self.validated_at = self.micro_batches
        own = [(rank.buffers, rank.generator) for rank in self.ranks]
        self.broadcast_buffers()
        self.net.eval()
        self.logged.begin("validate")
        self.hook("on_validation_start")
        if self.program.average is not None and self.program.average.evaluates:
            self.put_averages()
        self.hook("on_validation_epoch_start")
        global_batches = deal_evaluation(validation.samples, validation.batch, self.world)
        if validation.kind != "map":
            global_batches = deal_streams(validation.data, self.world)
        for at, micro in enumerate(global_batches):
            if micro[0]:
                self.hook("on_validation_batch_start", micro)
            for rank, mine in enumerate(micro):
                if mine:
                    parts = self.cast(validation.data, mine)
                    with self.as_rank(rank), torch.no_grad(), self.autocast():
                        loss = self.net.loss(parts)
                        self.logged.log("validation_step", rank, loss, at, parts)
            if micro[0]:
                self.hook("on_validation_batch_end", micro)
        self.hook("on_validation_epoch_end")
        self.logged.end(self.steps)
        self.hook("on_validation_end")
        self.take_averages()
        self.net.train()
        for each, (buffers, generator) in zip(self.ranks, own, strict=True):
            each.buffers, each.generator = buffers, generator
        self.logged.stage = "train"

    def update_average(self, trained: set[str]) -> None:
        """Update the averages from the weights. A parameter that has not been trained yet is its own average.

        The average is a callback that follows the one with the program's hooks, so it sees what these wrote.
        """
        plan = self.program.average
        if plan is None or self.steps <= plan.start:
            return
        for name, one in self.net.named_parameters():
            if name not in trained and name not in self.averages:
                continue
            wide = torch.promote_types(one.dtype, torch.float32)
            if self.updates == 0:
                self.averages[name] = one.detach().to(wide, copy=True)
            else:
                average = self.averages.setdefault(name, self.before[name].to(wide, copy=True))
                average.lerp_(one.detach().to(wide), 1 - plan.decay)
        self.updates += 1

    def put_averages(self) -> None:
        for name, one in self.net.named_parameters():
            if name in self.averages:
                self.trained[name] = one.detach().clone()
                one.data.copy_(self.averages[name])

    def take_averages(self) -> None:
        for name, one in self.net.named_parameters():
            if name in self.trained:
                one.data.copy_(self.trained[name])
        self.trained = {}

    def evaluate_checkpoint(self, plan: Evaluation) -> Evaluated:
        average = self.program.average
        averages = plan.averaged
        if averages is None:  # as the run evaluates, or as it leaves the module
            averages = average is not None and self.updates > 0 and (average.evaluates or bool(self.trained))
        if averages and not self.updates:
            return Evaluated(refused=True)
        kept = self.net, self.parameters, self.trained, self.strategy
        self.net, self.strategy = copy.deepcopy(self.net), plan.strategy
        self.parameters = list(self.net.parameters())
        self.take_averages()
        if averages:
            self.put_averages()
        put_buffers(self.net, self.ranks[0].buffers)
        weights = {name: one.detach().clone() for name, one in self.net.state_dict().items()}
        self.net.eval()
        sums = samples = 0.0
        for micro in deal_evaluation(EVALUATED.samples, EVALUATED.batch, plan.ranks):
            for mine in micro:
                if mine:
                    with torch.no_grad(), self.in_half(), self.autocast():
                        sums += len(mine) * float(self.net.loss(self.cast(EVALUATED.data, mine)))
                    samples += len(mine)
        self.net, self.parameters, self.trained, self.strategy = kept
        return Evaluated(loss=sums / samples, weights=weights)
