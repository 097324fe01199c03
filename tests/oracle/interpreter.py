"""The program as a hand-written training loop, in one process and without any code of the engine.

Every rank computes its micro-batches in turn; see `oracle.rank_states`.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from oracle.dealing import GlobalBatch, deal, deal_streams, epoch_order, estimated_steps, stated_length
from oracle.evaluations import Evaluations
from oracle.nets import apply_change, write
from oracle.optimizers import make_optimizer
from oracle.outcome import Outcome, numbers_in, scheduler_state
from oracle.program import OWN_PARTS, Evaluation, Program, Resume, Turn, Write
from oracle.rank_states import MicroBatch, put_buffers


class Stopped(Exception): ...


class Loop(Evaluations):
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
        names: dict[Any, str] = {one: name for name, one in self.net.named_parameters()}
        outcome.states = [{names[of]: numbers_in(state) for of, state in one.state.items()} for one in self.optimizers]
        outcome.schedulers = [scheduler_state(one) for one, _ in self.schedulers]
        self.hook("on_fit_end")
        self.save_where_asked()
        return self.end()

    def end(self) -> Outcome:
        put_buffers(self.net, self.ranks[0].buffers)
        self.outcome.weights = {name: one.detach().cpu().clone() for name, one in self.net.state_dict().items()}
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
        self.hook("on_train_epoch_end")
        self.logged.end(self.steps)
        if not cut:
            self.epoch += 1
            self.batch_idx = 0
            for scheduler, plan in self.schedulers:
                if plan.interval == "epoch" and self.epoch % plan.frequency == 0:
                    self.step_scheduler(scheduler, plan.kind)
        self.save_where_asked()
        if cut:
            raise Stopped

    def window(self, window: list[GlobalBatch], over: bool) -> bool:
        """Train on one window; return False if a hook ended the epoch."""
        program = self.program
        micros = [self.micro_batch(samples) for samples in window]
        announced = sum(sum(micro.weights) for micro in micros)
        for at, micro in enumerate(micros):
            if self.has_no_loss(self.batch_idx + at):
                micro.weights = [0.0] * self.world
        total = sum(sum(micro.weights) for micro in micros)
        # While losses are multiplied, it is not known yet which micro-batches have none.
        self.share = total / announced if self.scales_loss and total else 1.0
        loss = 0.0
        for micro in micros:
            first, last = micro is micros[0], micro is micros[-1]
            if self.begins_with_skip(micro.samples):
                return False
            self.losses = [math.nan] * self.world
            if program.manual:
                with self.around_forwards(micro, first=True, last=True):
                    self.turns(micro)
                stepped = True
            else:
                if first:
                    for _ in self.optimizers:
                        self.hook("on_before_zero_grad")
                    self.clear(self.parameters)
                with self.around_forwards(micro, first, last):
                    loss += self.forward_backward(micro, total)
                    self.hook_after_losses(micro)
                stepped = last and total > 0 and self.close(micros, total, loss)
            self.end_micro_batch(micro, stepped)
            if last:
                self.save_where_asked()
            self.validate_within(over and last)
            if last:
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
        self.outcome.samples_of_ranks.append((self.epoch, micro))
        return False

    def end_micro_batch(self, micro: MicroBatch, stepped: bool) -> None:
        """Count, step schedulers, and record what is compared."""
        outcome = self.outcome
        self.batch_idx += 1
        self.micro_batches += 1
        self.samples += sum(map(len, micro.samples))
        if stepped:
            self.steps += 1
            for scheduler, plan in self.schedulers if not self.program.manual else ():
                if plan.interval == "step" and self.steps % plan.frequency == 0:
                    self.step_scheduler(scheduler, plan.kind)
        outcome.losses_of_ranks.append(self.losses)
        if self.scales_loss:
            outcome.scales.append(self.scale)
        if self.program.records_norms:
            outcome.norms.append(self.gradient_norm)
        outcome.steps.append((self.steps, torch.cat([one.detach().flatten().double() for one in self.parameters])))
        trained = {name for name, one in self.net.named_parameters() if one.requires_grad}
        self.hook("on_train_batch_end", micro.samples)
        if stepped:
            self.update_average(trained)
            self.logged.after_step(self.steps)

    def has_no_loss(self, batch_idx: int) -> bool:
        return self.program.missing_loss == "always" or (self.program.missing_loss == "odd" and batch_idx % 2 == 1)

    def forward_backward(self, micro: MicroBatch, total: float, again: bool = False) -> float:
        """Run one micro-batch on all ranks; return its part of the window's loss. ``again``: nothing is logged."""
        program, part = self.program, 0.0
        if self.has_no_loss(self.batch_idx):
            return part
        for rank, (parts, joins, weight) in enumerate(zip(micro.parts, micro.joins, micro.weights, strict=True)):
            with self.as_rank(rank):
                with self.autocast():
                    loss = self.net.loss(parts)
                    if program.missing_loss == "nan":
                        loss = loss * float("nan")
                    if not again and not joins:
                        self.logged.log("training_step", rank, loss, self.batch_idx, parts)
                    if program.adds_to_loss:
                        loss = loss + self.net.penalty()
                if not again and not joins:
                    self.losses[rank] = float(loss.detach())
                if weight:
                    (loss * (self.world * weight / total) * (self.scale * self.share)).backward()
                    part += float(loss.detach()) * weight / total
        return part

    def hook_after_losses(self, micro: MicroBatch) -> None:
        if not self.has_no_loss(self.batch_idx):
            self.hook("on_before_backward", micro.samples)
            self.hook("on_after_backward", micro.samples)

    def close(self, micros: list[MicroBatch], total: float, loss: float) -> bool:
        """Step with the gradients of the window; return False if they overflowed."""
        program = self.program
        self.average_gradients()
        if self.strategy.startswith("deepspeed"):  # its partitions are flat, with zeros for missing gradients
            for parameter in self.parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        # As torch's scaler does: gradients of parameters that no optimizer holds may overflow.
        finite = self.unscale(held_by(self.optimizers))
        self.measure_norm(self.optimizers)
        for optimizer in self.optimizers:
            self.outcome.rates.append([float(group["lr"]) for group in optimizer.param_groups])
            self.hook("on_before_optimizer_step")
        if program.takes_closure:
            computed = [loss]

            def closure() -> Any:
                value = computed.pop() if computed else self.evaluate(micros, total)
                self.clip(held_by(self.optimizers), program.clip, program.clip_by)
                return torch.tensor(value)

            self.optimizers[0].step(closure)
            self.copy_gradients_to_ranks()
            return True
        self.clip(held_by(self.optimizers), program.clip, program.clip_by)
        if finite:
            for optimizer in self.optimizers:
                optimizer.step()
        elif self.scales_loss:
            self.scale *= 0.5
        self.copy_gradients_to_ranks()
        return finite

    def evaluate(self, micros: list[MicroBatch], total: float) -> float:
        """Evaluate the window again at the optimizer's current point, without logging."""
        self.clear(self.parameters)
        value = 0.0
        for micro in micros:
            with torch.enable_grad(), self.around_forwards(micro, micro is micros[0], micro is micros[-1]):
                value += self.forward_backward(micro, total, again=True)
        self.average_gradients()
        return value

    def unscale(self, parameters: list[Any]) -> bool:
        """Divide gradients by the loss scale; return whether all are finite."""
        gradients = [one.grad for one in parameters if one.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale * self.share)
        return not self.scales_loss or all(bool(gradient.isfinite().all()) for gradient in gradients)

    def measure_norm(self, optimizers: list[Any]) -> None:
        if self.program.measures_norms:
            gradients = [one.grad.to_dense() for one in held_by(optimizers) if one.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            self.outcome.step_norms.append(norm if math.isfinite(norm) else math.inf)

    def clip(self, parameters: list[Any], value: float | None, algorithm: str = "norm") -> None:
        if value is not None and algorithm == "norm":
            self.gradient_norm = clip_norm(parameters, value)
        elif value is not None:
            torch.nn.utils.clip_grad_value_(parameters, value)

    def turns(self, micro: MicroBatch) -> None:
        """Run the module's own loop on all ranks in lockstep."""
        finite = True
        for turn in self.program.manual:
            held = held_by([self.optimizers[turn.optimizer]])
            others = [one for one in self.parameters if all(one is not mine for mine in held) and one.requires_grad]
            for one in others if turn.toggles else ():
                one.requires_grad_(False)
            for _ in range(turn.repeats):
                finite = self.manual_step(turn, held, micro) and finite
            for one in others if turn.toggles else ():
                one.requires_grad_(True)
        if not finite:
            self.scale *= 0.5
        for rank, (parts, joins) in enumerate(zip(micro.parts, micro.joins, strict=True)):
            if not joins:
                loss = torch.tensor(self.losses[rank], dtype=torch.float64)
                self.logged.log("training_step", rank, loss, self.batch_idx, parts)

    def manual_step(self, turn: Turn, held: list[Any], micro: MicroBatch) -> bool:
        """Do one forward, backward and step of an optimizer on all ranks; return False if gradients overflowed."""
        optimizer: Any = self.optimizers[turn.optimizer]
        plan = self.program.optimizers[turn.optimizer]
        with_data = micro.joins.count(False)

        def closure() -> Tensor:
            for rank, (parts, joins) in enumerate(zip(micro.parts, micro.joins, strict=True)):
                with self.as_rank(rank):
                    with self.autocast():
                        loss = self.net.loss_of_part(plan.of, parts)
                    for position, parameter in enumerate(self.parameters):
                        if any(parameter is mine for mine in held):
                            parameter.grad = None
                            self.ranks[rank].gradients[position] = None
                    if not joins:
                        (loss * (self.world / with_data) * self.scale).backward()
                        self.losses[rank] = float(loss.detach())
            self.hook("on_before_backward", micro.samples)
            self.hook("on_after_backward", micro.samples)
            self.average_gradients()
            kept = [loss for loss, joins in zip(self.losses, micro.joins, strict=True) if not joins]
            return torch.tensor(sum(kept) / len(kept))

        def before_step() -> None:
            self.measure_norm([optimizer])
            self.outcome.rates.append([float(group["lr"]) for group in optimizer.param_groups])
            self.hook("on_before_optimizer_step", micro.samples)

        finite = True
        if turn.closure and plan.evaluates_again:
            hooks_called: list[bool] = []

            def closure_with_hooks() -> Tensor:
                with torch.enable_grad():
                    loss = closure()
                if not hooks_called:
                    hooks_called.append(True)
                    before_step()
                return loss

            optimizer.step(closure_with_hooks)
        else:
            closure()
            finite = self.unscale(held)
            for _ in range(turn.clips):
                self.clip(held, 0.1)
            before_step()
            if finite:
                optimizer.step()
        self.copy_gradients_to_ranks()
        return finite

    def step_scheduler(self, scheduler: Any, kind: str) -> None:
        program = self.program
        if kind == "linear" and self.steps > estimated_steps(program, self.world):
            self.outcome.error = "ConfigurationError"  # the schedule has ended, but there is more data
            raise Stopped
        if kind == "plateau":
            value = self.logged.monitored()
            if value is not None:  # None: no validation since the last step
                scheduler.step(value)
        else:
            scheduler.step()

    def hook(self, name: str, micro: GlobalBatch | None = None) -> None:
        program = self.program
        count = self.calls.get(name, 0)
        self.calls[name] = count + 1
        self.outcome.hooks.append(name)
        at = self.batch_idx - (name == "on_train_batch_end")
        for rank in range(self.world):
            if micro is None or micro[rank]:
                samples = None if micro is None else len(micro[rank])
                put_buffers(self.net, self.ranks[rank].buffers)
                self.logged.log(name, rank, None, self.hook_index(name, at), None, samples)
        for change in program.changes:
            if change.hook == name and change.epoch == self.epoch and change.batch == self.hook_index(name, at):
                apply_change(self.net, change, self.optimizers[0])
        if program.writes is not None and program.writes.hook == name and program.writes.at == count:
            self.write(program.writes)
        stop, saving = program.stop, program.saving
        if stop is not None and stop.how == "should_stop" and stop.hook == name and stop.at == count:
            self.should_stop = True
        if saving is not None and saving.hook == name and saving.at == count:
            self.save_requested = True

    def write(self, plan: Write) -> None:
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


def held_by(optimizers: list[Any]) -> list[Any]:
    return [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]


def clip_norm(parameters: list[Any], bound: float) -> float:
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        return float(torch.nn.utils.clip_grad_norm_(parameters, bound))
    # Torch's function does not support sparse gradients.
    norm = float(torch.nn.utils.get_total_norm([gradient.to_dense() for gradient in gradients]))
    for gradient in gradients:
        gradient.mul_(min(1.0, bound / (norm + 1e-6)))
    return norm


def interpret(program: Program, nudged: int | None = None) -> Outcome:
    """Return the expected results; with ``nudged``, a seed, for initial weights that differ by a rounding error."""
    loop = Loop(program)
    if nudged is not None:
        signs = torch.Generator().manual_seed(nudged)
        with torch.no_grad():
            for parameter in loop.parameters:
                up = torch.rand(parameter.shape, generator=signs) < 0.5
                parameter.mul_(1 + torch.where(up, 1, -1) * torch.finfo(parameter.dtype).eps)
    return loop.run()
