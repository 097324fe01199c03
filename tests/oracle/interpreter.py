"""The program as a hand-written loop: one process that plays all ranks in turn, and shares no code with the engine.

Buffers, random generators and gradients are kept per rank. Weights and optimizers are common.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oracle.data_loaders import numbers
from oracle.dealing import GlobalBatch, deal, deal_evaluation, deal_streams, epoch_order, stated_length
from oracle.logged_values import LoggedValues
from oracle.nets import Model, Parts, add_group, part_of, seeded_model, write
from oracle.optimizers import make_optimizer, make_scheduler
from oracle.outcome import Evaluated, Outcome, scheduler_state, tensors_of
from oracle.program import EVALUATED, OWN_PARTS, Evaluation, Program, Resume, Turn, Write

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Stopped(Exception):
    """Raised when the run ends."""


@dataclass
class Rank:
    """The state of one rank."""

    buffers: dict[str, Tensor]
    generator: Tensor
    gradients: list[Tensor | None] = field(default_factory=list)
    last: Any = None  # the previous micro-batch, used for joining if the data is the rank's own part


class Loop:
    """Trains a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.world = program.ranks
        self.strategy = program.strategy
        self.net = seeded_model(program)
        if program.precision in DTYPES:
            self.net.to(DTYPES[program.precision])
        self.parameters = list(self.net.parameters())
        self.optimizers = [make_optimizer(self.net, program, plan) for plan in program.optimizers]
        self.schedulers = [
            (make_scheduler(self.optimizers[0], plan, self.estimate()), plan) for plan in program.schedulers
        ]
        self.ranks = [self.new_rank(rank, 1000) for rank in range(self.world)]
        self.scales_loss = program.precision == "16-mixed"
        self.scale = 65536.0 if self.scales_loss else 1.0
        self.share = 1.0
        self.synchronised = True
        self.outcome = Outcome()
        self.logged = LoggedValues(program, self.outcome)
        self.calls: dict[str, int] = {}
        self.steps = self.epoch = self.micro_batches = self.samples = 0
        self.batch_idx = 0
        self.should_stop = self.save_requested = self.changes_ranks = self.limited = False
        self.validated_at = -1
        self.before = {name: one.detach().clone() for name, one in self.net.named_parameters()}
        self.averages: dict[str, Tensor] = {}
        self.updates = 0
        self.trained: dict[str, Tensor] = {}  # while the network holds the averages

    # Ranks, one at a time

    def new_rank(self, rank: int, seed: int) -> Rank:
        buffers = {name: one.clone() for name, one in self.net.named_buffers()}
        return Rank(buffers, torch.Generator().manual_seed(seed + rank).get_state(), [None] * len(self.parameters))

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[Rank]:
        """Give the network and the process the state of ``rank`` within the context."""
        this = self.ranks[rank]
        outside = torch.get_rng_state()
        torch.set_rng_state(this.generator)
        put_buffers(self.net, this.buffers)
        for parameter, gradient in zip(self.parameters, this.gradients, strict=True):
            parameter.grad = gradient
        try:
            with self.in_half():
                yield this
        finally:
            this.buffers = dict(self.net.named_buffers())
            this.gradients = [parameter.grad for parameter in self.parameters]
            this.generator = torch.get_rng_state()
            torch.set_rng_state(outside)

    @contextlib.contextmanager
    def in_half(self) -> Iterator[None]:
        """Compute with half-precision parameters as ZeRO does; the optimizer's parameters stay exact."""
        dtype = AUTOCAST.get(self.program.precision)
        if dtype is None or not self.strategy.startswith("deepspeed"):
            yield
            return
        norms = [layer for layer in self.net.modules() if isinstance(layer, torch.nn.BatchNorm1d)]
        cast_again = {id(one) for layer in norms for one in layer.parameters()}  # rounded, but used in float32
        exact = [(parameter, parameter.data, parameter.grad) for parameter in self.parameters]
        for parameter, data, _ in exact:
            parameter.grad = None
            rounded = data.to(dtype)
            parameter.data = rounded.to(data.dtype) if id(parameter) in cast_again else rounded
        try:
            yield
        finally:
            for parameter, data, before in exact:
                fresh, parameter.grad, parameter.data = parameter.grad, None, data
                fresh = None if fresh is None else fresh.to(dtype).to(data.dtype)
                parameter.grad = before if fresh is None else fresh if before is None else before + fresh

    def average_gradients(self) -> None:
        """Replace `Rank.gradients` by their mean over ranks, on all ranks."""
        for position, parameter in enumerate(self.parameters):
            held = [rank.gradients[position] for rank in self.ranks]
            if any(gradient is not None for gradient in held):
                shares = [torch.zeros_like(parameter) if one is None else one / len(held) for one in held]
                mean = sum(shares[1:], shares[0])
                for rank in self.ranks:
                    rank.gradients[position] = mean.clone()
            parameter.grad = self.ranks[0].gradients[position]

    @contextlib.contextmanager
    def around_forwards(self, batches: list[tuple[Parts, bool]], at: int, last: int) -> Iterator[None]:
        """Run all ranks' forwards of micro-batch ``at`` of a window, which ends with ``last``, within the context.

        Buffers are broadcast as DDP does, after a backward that synchronised, and so not after a dropped window. A rank
        that only joins has its buffers of before again afterwards.
        """
        joiners = [self.ranks[rank] for rank, (_, joins) in enumerate(batches) if joins]
        before = [{name: one.clone() for name, one in rank.buffers.items()} for rank in joiners]
        if self.broadcasts_buffers() and at == 0 and self.synchronised:
            self.broadcast_buffers()
        yield
        self.synchronised = at == last
        for rank, buffers in zip(joiners, before, strict=True):
            rank.buffers = buffers

    def broadcast_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks."""
        for rank in self.ranks[1:]:
            rank.buffers = {name: one.clone() for name, one in self.ranks[0].buffers.items()}

    # The run

    def run(self) -> Outcome:
        program, outcome = self.program, self.outcome
        self.hook("on_train_start")
        with contextlib.suppress(Stopped):
            while self.epoch < program.epochs and not self.reached_limit():
                self.logged.begin("train")
                self.hook("on_train_epoch_start")
                self.train_epoch()
                if self.should_stop:
                    break
        if outcome.error or outcome.refused:
            return self.end()
        self.hook("on_train_end")
        if self.updates:
            self.put_averages()
        outcome.metrics = self.logged.metrics()
        names = {one: name for name, one in self.net.named_parameters()}
        outcome.states = [tensors_of(one.state, names) for one in self.optimizers]
        outcome.schedulers = [scheduler_state(one) for one, _ in self.schedulers]
        self.hook("on_fit_end")
        self.save_where_asked()
        return self.end()

    def end(self) -> Outcome:
        put_buffers(self.net, self.ranks[0].buffers)
        self.outcome.weights = {name: one.detach().clone() for name, one in self.net.state_dict().items()}
        self.outcome.counts = {
            "steps": self.steps,
            "epochs": self.epoch,
            "micro_batches": self.micro_batches,
            "samples": self.samples,
        }
        return self.outcome

    def reached_limit(self) -> bool:
        stop = self.program.stop
        return stop is not None and stop.how == "max_steps" and self.steps >= stop.at

    def train_epoch(self) -> None:
        """Train on an epoch's windows; a run that is resumed continues on other ranks."""
        program = self.program
        for rank in range(self.world) if program.data.kind != "stateful" else ():
            with self.as_rank(rank):
                torch.empty((), dtype=torch.int64).random_()  # a DataLoader's iterator draws a seed for its workers
        left = epoch_order(program.data, program.seed, self.epoch)
        cut = False  # ended before the data did
        while not cut:
            global_batches = self.global_batches(left)
            done = 0
            for start in range(0, len(global_batches), program.accumulate):
                window = global_batches[start : start + program.accumulate]
                over = start + len(window) == len(global_batches)
                if not self.window(window, over):
                    left = []
                    break  # the data is nearly exhausted
                done += sum(len(one) for micro in window for one in micro)
                if self.changes_ranks and not over:  # the run was saved here, and continues on other ranks
                    self.changes_ranks = False
                    left = left[done:]
                    self.batch_idx = math.ceil((program.data.samples - len(left)) / (self.world * program.data.batch))
                    break
                if self.ends_after_window(over):
                    cut = True
                    break
            else:
                break
        # Nothing is read ahead from a stateful loader, since it would save another position: its length is believed.
        believed = program.data.kind == "stateful" and stated_length(program.data, self.world) == self.batch_idx
        self.end_epoch(cut and not believed)

    def global_batches(self, left: list[int]) -> list[GlobalBatch]:
        data = self.program.data
        if data.kind in OWN_PARTS:
            return deal_streams(data, self.world) if left else []
        return deal(data, left, self.world)

    def ends_after_window(self, over: bool) -> bool:
        """Return whether a stop was requested while there is data left."""
        self.limited = self.reached_limit()
        # otherwise the end of the data is not known yet
        over = over and stated_length(self.program.data, self.world) == self.batch_idx
        return not over and (self.should_stop or self.limited)

    def end_epoch(self, cut: bool) -> None:
        validation = self.program.validation
        if validation is not None and not (cut and self.limited and not self.should_stop):
            self.validate_at_the_end(cut)
        self.save_where_asked()
        self.logged.end_train_epoch(self.steps, lambda: self.hook("on_train_epoch_end"))
        if not cut:
            self.epoch += 1
            self.batch_idx = 0
            for scheduler, plan in self.schedulers:
                if plan.interval == "epoch" and self.epoch % plan.frequency == 0:
                    self.step_scheduler(scheduler, plan.kind)
        self.save_where_asked()
        if cut:
            raise Stopped

    # A window

    def window(self, window: list[GlobalBatch], over: bool) -> bool:
        """Train on one window; return False if a hook ended the epoch."""
        program = self.program
        batches = [[self.parts(micro, rank) for rank in range(self.world)] for micro in window]
        weights = [
            [self.weight(micro[rank], parts[rank]) for rank in range(self.world)]
            for micro, parts in zip(window, batches, strict=True)
        ]
        announced = sum(map(sum, weights))
        for at in range(len(window)):
            if self.has_no_loss(self.batch_idx + at):
                weights[at] = [0.0] * self.world
        total = sum(map(sum, weights))
        # While losses are multiplied, it is not known yet which micro-batches have none.
        self.share = total / announced if self.scales_loss and total else 1.0
        self.evaluations: list[Callable[[], float]] = []
        evaluated_loss = 0.0
        for at, (micro, parts) in enumerate(zip(window, batches, strict=True)):
            if self.begins_with_skip(micro):
                return False
            if program.manual:
                with self.around_forwards(parts, 0, 0):
                    self.turns(micro, parts)
                stepped = True
            else:
                if at == 0:
                    for _ in self.optimizers:
                        self.hook("on_before_zero_grad")
                    self.clear(self.parameters)
                with self.around_forwards(parts, at, len(window) - 1):
                    evaluated_loss += self.forward_backward(micro, parts, weights[at], total, first=True)
                closes = at == len(window) - 1
                stepped = closes and total > 0 and self.close(window, batches, weights, total, evaluated_loss)
            self.batch_idx += 1
            self.micro_batches += 1
            self.samples += sum(map(len, micro))
            if stepped:
                self.steps += 1
                if not program.manual:
                    for scheduler, plan in self.schedulers:
                        if plan.interval == "step" and self.steps % plan.frequency == 0:
                            self.step_scheduler(scheduler, plan.kind)
            held = torch.cat([one.detach().flatten().double() for one in self.parameters])
            self.outcome.steps.append((self.steps, held))
            trained = {name for name, one in self.net.named_parameters() if one.requires_grad}
            self.hook("on_train_batch_end", micro)
            if stepped:
                self.update_average(trained)
                self.logged.after_step(self.steps)
            if at == len(window) - 1:
                self.save_where_asked()
            self.validate_within(over and at == len(window) - 1)
            if at == len(window) - 1:
                self.save_where_asked()
        return True

    def begins_with_skip(self, micro: GlobalBatch) -> bool:
        stop = self.program.stop
        count = self.calls.get("on_train_batch_start", 0)
        self.hook("on_train_batch_start", micro)
        if stop is not None and stop.how == "raise" and stop.at == count:
            self.outcome.error = "Planned"
            raise Stopped
        if stop is not None and stop.how == "skip" and stop.at == self.batch_idx:
            self.clear(self.parameters)
            return True
        self.outcome.samples.append((self.epoch, micro[0]))
        self.logged.samples.append((self.epoch, [list(one) for one in micro]))
        return False

    def parts(self, micro: GlobalBatch, rank: int) -> tuple[Parts, bool]:
        """Return a rank's batch, and whether the rank only joins with it."""
        data, mine = self.program.data, micro[rank]
        joins = not mine
        if joins and data.kind in OWN_PARTS:
            mine = self.ranks[rank].last
        elif joins:
            mine = micro[0][:1]
        self.ranks[rank].last = mine
        return self.cast(data.samples, mine), joins

    def cast(self, samples: int, mine: list[int]) -> Parts:
        """Return some samples of a data set, in the dtype of the precision."""
        x, y, index = (part[mine] for part in numbers(samples, self.net.on_tokens))
        dtype = DTYPES.get(self.program.precision)
        if dtype is not None and not self.net.on_tokens:
            x, y = x.to(dtype), y.to(dtype)
        return x, y, index

    def weight(self, mine: list[int], given: tuple[Parts, bool]) -> float:
        parts, joins = given
        if joins:
            return 0.0
        return self.net.weight(parts) if self.program.token_weighted else float(len(mine))

    def has_no_loss(self, batch_idx: int) -> bool:
        return self.program.missing_loss == "always" or (self.program.missing_loss == "odd" and batch_idx % 2 == 1)

    def forward_backward(
        self, micro: GlobalBatch, batches: list[tuple[Parts, bool]], weights: list[float], total: float, first: bool
    ) -> float:
        """Run one micro-batch on all ranks; return its part of the window's loss. With ``first``, it is logged and
        hooks run.
        """
        program = self.program
        part = 0.0
        if self.has_no_loss(self.batch_idx):
            return part
        for rank, ((parts, joins), weight) in enumerate(zip(batches, weights, strict=True)):
            with self.as_rank(rank):
                with self.autocast():
                    loss = self.net.loss(parts)
                    if program.missing_loss == "nan":
                        loss = loss * float("nan")
                    if first and not joins:
                        self.logged.log("training_step", rank, self.net, loss, self.batch_idx, parts)
                    if program.adds_to_loss:
                        loss = loss + self.net.penalty()
                if weight:
                    (loss * (self.world * weight / total) * (self.scale * self.share)).backward()
                    part += float(loss.detach()) * weight / total
        if first:
            self.hook("on_before_backward", micro)
            self.hook("on_after_backward", micro)
        return part

    def close(
        self, window: list[GlobalBatch], batches: list[Any], weights: list[list[float]], total: float, loss: float
    ) -> bool:
        """Step with the gradients of the window; return False if they overflowed."""
        program = self.program
        self.average_gradients()
        if self.strategy.startswith("deepspeed"):  # its partitions are flat, with zeros for missing gradients
            for parameter in self.parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        # As torch's scaler does: gradients of parameters that no optimizer holds may overflow.
        finite = self.unscale([one for opt in self.optimizers for group in opt.param_groups for one in group["params"]])
        for optimizer in self.optimizers:
            self.outcome.rates.append([float(group["lr"]) for group in optimizer.param_groups])
            self.hook("on_before_optimizer_step")
        if program.takes_closure:
            first_idx = self.batch_idx - len(window) + 1
            computed = [loss]

            def closure() -> Any:
                value = computed.pop() if computed else self.evaluate(window, batches, weights, total, first_idx)
                self.clip()
                return torch.tensor(value)

            self.optimizers[0].step(closure)
            self.copy_gradients_to_ranks()
            return True
        self.clip()
        if finite:
            for optimizer in self.optimizers:
                optimizer.step()
        elif self.scales_loss:
            self.scale *= 0.5
        self.copy_gradients_to_ranks()
        return finite

    def evaluate(
        self, window: list[GlobalBatch], batches: list[Any], weights: list[list[float]], total: float, first_idx: int
    ) -> float:
        """Evaluate the window again at the optimizer's current point, without logging."""
        self.clear(self.parameters)
        with torch.enable_grad():
            value = 0.0
            for at, micro in enumerate(window):
                with self.around_forwards(batches[at], at, len(window) - 1):
                    value += self.forward_backward(micro, batches[at], weights[at], total, first=False)
        self.average_gradients()
        return value

    def unscale(self, parameters: list[Any]) -> bool:
        """Divide gradients by the loss scale; return whether all are finite."""
        gradients = [one.grad for one in parameters if one.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale * self.share)
        return not self.scales_loss or all(bool(gradient.isfinite().all()) for gradient in gradients)

    def clip(self) -> None:
        held = [one for opt in self.optimizers for group in opt.param_groups for one in group["params"]]
        self.clip_by(held, self.program.clip, self.program.clip_by)

    def clip_by(self, parameters: list[Any], value: float | None, algorithm: str) -> None:
        if value is not None and algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, value)
        elif value is not None:
            torch.nn.utils.clip_grad_value_(parameters, value)

    def copy_gradients_to_ranks(self) -> None:
        for rank in self.ranks:
            rank.gradients = [None if one.grad is None else one.grad.clone() for one in self.parameters]

    def clear(self, parameters: list[Any]) -> None:
        known = {id(one) for one in parameters}
        for position, parameter in enumerate(self.parameters):
            if id(parameter) in known:
                parameter.grad = None
                for rank in self.ranks:
                    rank.gradients[position] = None

    # Manual optimization

    def turns(self, micro: GlobalBatch, batches: list[tuple[Parts, bool]]) -> None:
        """Run the module's own loop on all ranks in lockstep."""
        finite = True
        losses: list[Tensor] = []
        for turn in self.program.manual:
            optimizer = self.optimizers[turn.optimizer]
            held = [one for group in optimizer.param_groups for one in group["params"]]
            others = [one for one in self.parameters if all(one is not mine for mine in held) and one.requires_grad]
            for one in others if turn.toggles else ():
                one.requires_grad_(False)
            for _ in range(turn.repeats):
                ok, losses = self.manual_step(turn, optimizer, held, micro, batches)
                finite = finite and ok
            for one in others if turn.toggles else ():
                one.requires_grad_(True)
        if not finite:
            self.scale *= 0.5
        for rank, (parts, joins) in enumerate(batches):
            if not joins:
                self.logged.log("training_step", rank, self.net, losses[rank], self.batch_idx, parts)

    def manual_step(
        self, turn: Turn, optimizer: Any, held: list[Any], micro: GlobalBatch, batches: list[tuple[Parts, bool]]
    ) -> tuple[bool, list[Tensor]]:
        with_data = sum(1 for _, joins in batches if not joins)
        losses: list[Tensor] = []

        def closure() -> Tensor:
            losses.clear()
            for rank, (parts, joins) in enumerate(batches):
                with self.as_rank(rank):
                    with self.autocast():
                        loss = self.net.loss(parts)
                    for position, parameter in enumerate(self.parameters):
                        if any(parameter is mine for mine in held):
                            parameter.grad = None
                            self.ranks[rank].gradients[position] = None
                    if not joins:
                        (loss * (self.world / with_data) * self.scale).backward()
                    losses.append(loss.detach())
            self.hook("on_before_backward", micro)
            self.hook("on_after_backward", micro)
            self.average_gradients()
            kept = [float(loss) for loss, (_, joins) in zip(losses, batches, strict=True) if not joins]
            return torch.tensor(sum(kept) / len(kept))

        def before_step() -> None:
            self.outcome.rates.append([float(group["lr"]) for group in optimizer.param_groups])
            self.hook("on_before_optimizer_step", micro)

        if turn.closure and self.program.optimizers[turn.optimizer].evaluates_again:
            hooks_called: list[bool] = []

            def closure_with_hooks() -> Tensor:
                with torch.enable_grad():
                    loss = closure()
                if not hooks_called:
                    hooks_called.append(True)
                    before_step()
                return loss

            optimizer.step(closure_with_hooks)
            self.copy_gradients_to_ranks()
            return True, losses
        closure()
        finite = self.unscale(held)
        for _ in range(turn.clips):
            self.clip_by(held, 0.1, "norm")
        before_step()
        if finite:
            optimizer.step()
        self.copy_gradients_to_ranks()
        return finite, losses

    # Other parts of a step

    def broadcasts_buffers(self) -> bool:
        program = self.program
        if self.world == 1 or not self.strategy.startswith("ddp"):
            return False
        return program.broadcast is not False

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.program.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def step_scheduler(self, scheduler: Any, kind: str) -> None:
        if kind == "linear" and self.steps > self.estimate():
            self.outcome.error = "ConfigurationError"  # the schedule has ended, but there is more data
            raise Stopped
        if kind == "plateau":
            value = self.logged.monitored()
            if value is not None:  # None: no validation since the last step
                scheduler.step(value)
        else:
            scheduler.step()

    def hook(self, name: str, micro: GlobalBatch | None = None) -> None:
        """Call a hook: perform the program's actions in it, on all ranks."""
        program = self.program
        count = self.calls.get(name, 0)
        self.calls[name] = count + 1
        self.outcome.hooks.append(name)
        at = self.batch_idx - (name == "on_train_batch_end")
        for rank in range(self.world):
            if micro is None or micro[rank]:
                samples = None if micro is None else len(micro[rank])
                put_buffers(self.net, self.ranks[rank].buffers)
                self.logged.log(name, rank, self.net, None, self.hook_index(name, at), None, samples)
        for change in program.changes:
            if change.hook == name and change.epoch == self.epoch and change.batch == self.hook_index(name, at):
                for one in part_of(self.net, change.part):
                    one.requires_grad_(change.what != "freeze")
                if change.what == "group":
                    add_group(self.optimizers[0], part_of(self.net, change.part))
        if program.writes is not None and program.writes.hook == name and program.writes.at == count:
            self.write(program.writes)
        stop, saving = program.stop, program.saving
        if stop is not None and stop.how == "should_stop" and stop.hook == name and stop.at == count:
            self.should_stop = True
        if saving is not None and saving.hook == name and saving.at == count:
            self.save_requested = True

    def write(self, plan: Write) -> None:
        """Write weights, which ranks share; or the gradients of all ranks."""
        if not plan.of_gradients or plan.hook == "on_before_optimizer_step":
            write(self.net, plan.what)
            return
        for rank in self.ranks:
            for parameter, gradient in zip(self.parameters, rank.gradients, strict=True):
                parameter.grad = gradient
            write(self.net, plan.what)
            rank.gradients = [parameter.grad for parameter in self.parameters]

    def hook_index(self, name: str, at: int) -> int:
        return at if name in ("on_train_batch_start", "on_train_batch_end") else 0

    def save_where_asked(self) -> None:
        """Record a save, and do with it what the program says."""
        if not self.save_requested:
            return
        self.save_requested = False
        self.outcome.saved_after = self.micro_batches
        self.outcome.saved_at_end = self.epoch >= self.program.epochs
        self.outcome.saved_hooks = len(self.outcome.hooks)
        self.outcome.saved_rates = len(self.outcome.rates)
        self.outcome.saved_flushes = len(self.outcome.flushes)
        saving = self.program.saving
        if isinstance(saving, Evaluation):
            self.outcome.evaluated = self.evaluate_checkpoint(saving)
        elif saving is not None:
            self.resume(saving)

    def resume(self, resume: Resume) -> None:
        """Go on as the new process does: with the optimizers that it has, and on its ranks."""
        if resume.refused:
            self.outcome.refused = True
            raise Stopped
        if resume.restarted:
            plan = resume.optimizers(self.program.optimizers)[0]
            self.optimizers[0] = make_optimizer(self.net, self.program, plan)
        self.strategy = resume.strategy
        if resume.ranks == self.world:
            return
        put_buffers(self.net, self.ranks[0].buffers)
        self.world = resume.ranks
        self.ranks = [self.new_rank(rank, 1100) for rank in range(self.world)]
        self.changes_ranks = True

    def evaluate_checkpoint(self, plan: Evaluation) -> Evaluated:
        """Return what an evaluation of a checkpoint that is saved now gives."""
        average = self.program.average
        averages = plan.averaged
        if averages is None:  # as the run evaluates, or as it leaves the module
            averages = average is not None and self.updates > 0 and (average.evaluates or bool(self.trained))
        if averages and not self.updates:
            return Evaluated(refused=True)
        before = {name: one.detach().clone() for name, one in self.net.named_parameters()}
        trained = dict(self.trained)
        strategy, self.strategy = self.strategy, plan.strategy
        self.take_averages()
        if averages:
            self.put_averages()
        buffers = dict(self.net.named_buffers())
        put_buffers(self.net, self.ranks[0].buffers)
        weights = {name: one.detach().clone() for name, one in self.net.state_dict().items()}
        self.net.eval()
        sums = samples = 0.0
        for micro in deal_evaluation(EVALUATED.samples, EVALUATED.batch, plan.ranks):
            for mine in micro:
                if mine:
                    with torch.no_grad(), self.in_half(), self.autocast():
                        sums += len(mine) * float(self.net.loss(self.cast(EVALUATED.samples, mine)))
                    samples += len(mine)
        self.net.train()
        put_buffers(self.net, buffers)
        self.strategy = strategy
        for name, one in self.net.named_parameters():
            one.data.copy_(before[name])
        self.trained = trained
        return Evaluated(loss=sums / samples, weights=weights)

    # Averages

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
        """Load the averages into the network, and keep the trained weights."""
        for name, one in self.net.named_parameters():
            if name in self.averages:
                self.trained[name] = one.detach().clone()
                one.data.copy_(self.averages[name])

    def take_averages(self) -> None:
        """Load the trained weights into the network again."""
        for name, one in self.net.named_parameters():
            if name in self.trained:
                one.data.copy_(self.trained[name])
        self.trained = {}

    # Validation

    def validate_within(self, over: bool) -> None:
        validation = self.program.validation
        if validation is None or validation.interval is None or not self.due():
            return
        if self.batch_idx % self.interval() == 0:
            self.validate()

    def validate_at_the_end(self, cut: bool) -> None:
        validation = self.program.validation
        assert validation is not None
        if not self.due():
            return
        if validation.interval is None or cut or self.missed():
            if self.outcome.hooks and self.validated_at == self.micro_batches:
                return
            self.validate()

    def due(self) -> bool:
        validation = self.program.validation
        assert validation is not None
        return (self.epoch + 1) % validation.every_n_epochs == 0

    def interval(self) -> int:
        validation, data = self.program.validation, self.program.data
        assert validation is not None
        if isinstance(validation.interval, int):
            return validation.interval
        assert validation.interval is not None
        length = stated_length(data, self.world)
        return max(1, int((2**31 if length is None else length) * validation.interval))  # None would be refused

    def missed(self) -> bool:
        """Return whether the data ended before a validation that the stated length had promised."""
        validation, length = self.program.validation, stated_length(self.program.data, self.world)
        assert validation is not None
        if length is None or validation.interval is None:
            return False
        interval = self.interval()
        if isinstance(validation.interval, int):  # if there was none at all, their number depends on the data
            return self.batch_idx < interval <= length
        return (self.batch_idx // interval + 1) * interval <= length

    def estimate(self) -> int:
        """Return the run's number of steps, as estimated from the lengths of loaders."""
        program = self.program
        length = stated_length(program.data, self.world)
        steps = -(-length // program.accumulate) * program.epochs if length is not None else 0
        stop = program.stop
        return min(steps, stop.at) if stop is not None and stop.how == "max_steps" else steps

    def validate(self) -> None:
        """Validate on all ranks with rank 0's buffers; training's own buffers, generators and modes are restored."""
        validation = self.program.validation
        assert validation is not None
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
                    parts = self.cast(validation.samples, mine)
                    with self.as_rank(rank), torch.no_grad(), self.autocast():
                        loss = self.net.loss(parts)
                        self.logged.log("validation_step", rank, self.net, loss, at, parts)
            if micro[0]:
                self.hook("on_validation_batch_end", micro)
        self.logged.end_validation(self.steps, lambda: self.hook("on_validation_epoch_end"))
        self.hook("on_validation_end")
        self.take_averages()
        self.net.train()
        for each, (buffers, generator) in zip(self.ranks, own, strict=True):
            each.buffers, each.generator = buffers, generator
        self.logged.enter("train")


def put_buffers(net: Model, buffers: dict[str, Tensor]) -> None:
    """Make these tensors the network's buffers, without copying."""
    for name, value in buffers.items():
        path, _, last = name.rpartition(".")
        net.get_submodule(path)._buffers[last] = value


def interpret(program: Program, nudged: int | None = None) -> Outcome:
    """Return the expected results of ``program``. With ``nudged``, a seed, the initial weights differ by a rounding
    error.
    """
    loop = Loop(program)
    if nudged is not None:
        signs = torch.Generator().manual_seed(nudged)
        with torch.no_grad():
            for parameter in loop.parameters:
                up = torch.rand(parameter.shape, generator=signs) < 0.5
                parameter.mul_(1 + torch.where(up, 1, -1) * torch.finfo(parameter.dtype).eps)
    return loop.run()
