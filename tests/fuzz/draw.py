"""Hypothesis strategies that draw programs: every choice shrinks to the simplest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from cpu_kernels import FP16
from oracle import program as plan

STRATEGIES = ("single_device", "ddp", "fsdp", "ddp_static_graph", "ddp_find_unused_parameters_true", "fsdp_grad_op")
ZERO = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")

ONE_WORKER = ("reused", "stateful", "combined")  # kinds of data that the process itself reads
PRECISIONS = ("32-true", "32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true")
ZERO_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed") if FP16 else ("32-true", "bf16-mixed")

Optimizers = tuple[plan.Optimizer, ...]
Changes = tuple[plan.Change, ...]
Logs = tuple[plan.Log, ...]
Validates = plan.Validation | None


class Drawn:
    def __init__(self, draw: Any, strategies: Sequence[str]) -> None:
        self.draw = draw
        self.strategies = strategies

    def one_of(self, *choices: Any) -> Any:
        """Choose one of the options; the first is the simplest."""
        return self.draw(st.sampled_from(choices))

    def chance(self, percent: int) -> bool:
        return bool(self.draw(st.integers(0, 99)) >= 100 - percent)

    def between(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def program(self) -> plan.Program:
        if "ddp" in self.strategies and self.chance(7):
            return self.launched()
        self.strategy = strategy = self.one_of(*self.strategies)
        ranks = {"single_device": 1, "hsdp": 4}.get(strategy) or self.one_of(2, 2, 2, 1, 3)
        self.zero = strategy.startswith("deepspeed")
        self.precision = precision = self.one_of(*(ZERO_PRECISIONS if self.zero else PRECISIONS))
        manual = not strategy.startswith(("ddp_static", "deepspeed")) and self.chance(30)
        epochs = self.one_of(1, 2, 2, 3)
        single = ranks == 1 and strategy == "single_device"
        validation = self.validation(ranks) if self.chance(45) else None
        net = self.net()
        optimizers = self.optimizers(net, manual)
        changes: Changes = ()
        if epochs > 1 and not net.tied and not self.zero and self.chance(25):
            net, optimizers, changes = self.changes(net, epochs, optimizers)
        data = self.data(ranks)
        closure = optimizers[0].evaluates_again or optimizers[0].closure
        missing_loss = "never"
        if single and not manual and not closure and not changes and self.chance(12):
            missing_loss = self.one_of("odd", "always", *(["nan"] if precision == "16-mixed" else []))
        logs = tuple(self.log(net, manual, validation, missing_loss) for _ in range(self.between(0, 3)))
        writable = missing_loss == "never" and not closure and not changes
        writes = self.writes() if writable and self.chance(15) else None
        stops = missing_loss != "never" or self.chance(20)
        stop = self.stop(missing_loss, single) if stops else None
        resume: plan.Resume | None = None
        if stop is None and missing_loss == "never" and not changes and writes is None and self.chance(18):
            resume = self.resume(ranks, data, validation, optimizers)
            if resume.ranks != ranks and (net.dropout or data.drop_last):
                # Ranks draw other masks, and another number of ranks drops other samples.
                resume = plan.Resume(resume.hook, resume.at, ranks, strategy)
            if self.chance(60):
                optimizers, resume = self.changed(optimizers, resume)
            logs = tuple(log for log in logs if log.where != "on_train_start")  # which a resumed run calls again
            if resume.ranks != ranks:  # for which the meaning of a rank's own values is undefined
                logs = tuple(log for log in logs if log.sync_dist is not False)
        estimated = data.length_error is not None and (resume is None or resume.ranks == ranks)
        in_window = any(change.hook == "on_validation_end" for change in changes)  # because it may be refused
        accumulate = 1 if manual or in_window else self.one_of(1, 1, 2, 3)
        clip = None if manual or not self.chance(30) else self.one_of(0.1, 0.02)
        by_value = clip is not None and not closure and not self.zero  # ZeRO clips by norm only
        restarted = resume is not None and resume.restarted  # what schedulers do then is undefined
        schedulers = () if manual or closure or restarted else self.schedulers(validation, logs, changes, estimated)
        average = self.average() if self.chance(15) else None
        evaluation = None
        if resume is None and self.chance(5 if average is None else 60):
            evaluation = self.evaluation(average, validation)
        return plan.Program(
            strategy=strategy,
            ranks=ranks,
            precision=precision,
            net=net,
            data=data,
            optimizers=optimizers,
            schedulers=schedulers,
            manual=self.turns(optimizers) if manual else (),
            epochs=epochs,
            accumulate=accumulate,
            clip=clip,
            clip_by=self.one_of("norm", "norm", "value") if by_value else "norm",
            token_weighted=not manual and not data.consumes_batch and self.chance(25),
            adds_to_loss=not manual and self.chance(30),
            missing_loss=missing_loss,
            logs=logs,
            log_every=self.one_of(1, 1, 2, 50),
            validation=validation,
            changes=changes,
            writes=writes,
            stop=stop,
            resume=resume,
            broadcast=self.broadcast(manual, net),
            configure_model=self.chance(10),
            average=average,
            evaluation=evaluation,
            seed=self.between(0, 3),
        )

    def launched(self) -> plan.Program:
        return plan.Program(
            strategy="ddp",
            ranks=2,
            precision=self.one_of("64-true", "bf16-true", "32-true"),
            net=plan.Net(norm=self.one_of("none", "batch"), buffer=self.one_of("none", "in_place")),
            data=plan.Data(samples=self.between(4, 9), shuffle=True),
            optimizers=(plan.Optimizer("adamw"),),
            logs=(plan.Log(on_epoch=True),),
            configure_model=self.chance(50),
            launcher="fork",
        )

    def net(self) -> plan.Net:
        low = self.precision in ("16-mixed", "bf16-true")
        family = "mlp" if low else self.one_of("mlp", "mlp", "gru", "transformer")
        tied = family != "mlp" and self.chance(25)
        return plan.Net(
            family=family,
            norm=self.one_of("none", "batch", "layer") if family == "mlp" else "none",
            dropout=self.one_of(0.0, 0.3),
            buffer=self.one_of("none", "in_place", "reassigned"),
            scale=self.chance(25),
            unused=self.chance(5),
            tied=tied,
            hooked=self.chance(8),
        )

    def data(self, ranks: int) -> plan.Data:
        kind = self.one_of("map", "map", "map", "sampler", "batch_sampler", "iterable", "reused")
        samples = self.between(4, 14)
        if kind == "iterable" and self.chance(20):
            kind = "sharded"
        elif kind == "iterable" and self.chance(50):
            kind = self.one_of("stateful", "combined") if ranks == 1 else "stateful"
        if kind in plan.OWN_PARTS:
            samples = self.between(4 * ranks, 8 * ranks)
        own = kind == "batch_sampler" or kind in plan.OWN_PARTS
        return plan.Data(
            kind=kind,
            samples=samples,
            batch=self.between(1, 4),
            shuffle=kind == "map" and self.chance(60),
            drop_last=kind == "map" and samples >= 12 and self.chance(10),
            consumes_batch=self.chance(20),
            workers=2 * (kind == "sharded" or (kind not in ONE_WORKER and self.chance(4))),
            fewest_on_rank_0=kind in plan.OWN_PARTS and ranks > 1 and self.chance(60),
            length_error=self.one_of(0, 0, None, -2, -1, 2) if own else 0,
        )

    def optimizers(self, net: plan.Net, manual: bool) -> Optimizers:
        lr = self.one_of(0.1, 0.05)
        kind = self.one_of("sgd", "momentum", "adamw", "adamw")
        exact = self.precision in ("32-true", "64-true", "bf16-mixed") and not self.zero
        if exact and not net.dropout and self.chance(12):
            # A line search amplifies rounding.
            kinds = ("sam", "sam_sum") if self.precision == "bf16-mixed" else ("lbfgs", "sam", "sam_sum")
            return (plan.Optimizer(self.one_of(*kinds), "all", lr),)
        if self.chance(8):
            kind = self.one_of("optimistic", "heun")
            closure = kind == "optimistic" and exact and not manual and self.chance(30)
            return (plan.Optimizer(kind, "all", lr, split=self.chance(10), closure=closure),)
        if net.tied or self.zero or not self.chance(50 if manual else 20):
            return (plan.Optimizer(kind, "all", lr, split=self.chance(10)),)
        return (plan.Optimizer(kind, "body", lr), plan.Optimizer(self.one_of("sgd", "adamw"), "head", lr))

    def turns(self, optimizers: Optimizers) -> tuple[plan.Turn, ...]:
        if optimizers[0].evaluates_again:
            return (plan.Turn(closure=True),)
        toggles = len(optimizers) > 1 and self.chance(30)
        turns = []
        scales = self.precision == "16-mixed"  # combinations in which the number of steps or clips matters
        for _ in range(self.between(1, 2)):
            for number in range(len(optimizers)):
                clips = self.one_of(0, 1, 2) if scales else self.one_of(0, 0, 1, 2)
                closure = not clips and (optimizers[number].is_torch or not scales) and self.chance(15)
                steps = self.one_of(2, 1) if scales else self.one_of(1, 1, 2)
                turns.append(plan.Turn(number, steps, clips, toggles, closure))
        return tuple(turns)

    def changes(self, net: plan.Net, epochs: int, optimizers: Optimizers) -> tuple[plan.Net, Optimizers, Changes]:
        part = self.one_of("body", "head")
        what = self.one_of("unfreeze", "unfreeze", "group", "freeze")
        start = "on_train_epoch_start"
        hook = self.one_of(start, start, "on_train_epoch_end", "on_train_start", "on_validation_end")
        epoch = 0 if hook != start else self.between(1, epochs - 1)
        changes = [plan.Change(what, part, hook, epoch)]
        if what != "freeze":
            net = plan.Net(**{**vars(net), "frozen": part})
            if hook == start and epoch == 1 and epochs > 2 and self.chance(40):
                changes.append(plan.Change("freeze", part, hook, 2))
        lr, kind = optimizers[0].lr, optimizers[0].kind
        kind = "adamw" if optimizers[0].evaluates_again else kind
        return net, (plan.Optimizer(kind, "all", lr, closure=optimizers[0].closure),), tuple(changes)

    def writes(self) -> plan.Write:
        gradients = () if self.zero else ("gradients", "rebound")  # hooks do not use gradients under ZeRO
        what = self.one_of("weights", "data", "assigned", *gradients)
        if what in ("gradients", "rebound"):
            return plan.Write(what, self.one_of("on_before_optimizer_step", "on_after_backward"), self.between(0, 2))
        return plan.Write(what, self.one_of("on_train_batch_end", "on_train_epoch_start"), self.between(0, 1))

    def validation(self, ranks: int) -> plan.Validation:
        kind = self.one_of("map", "map", "map", "map", "iterable")
        sharded = kind == "iterable" and self.chance(20)
        return plan.Validation(
            kind="sharded" if sharded else kind,
            samples=self.between(1, 7) if kind == "map" else self.between(4 * ranks, 6 * ranks),
            length_error=0 if kind == "map" else self.one_of(0, -1, 2, None),
            workers=2 if sharded else 0,
            batch=self.between(1, 3),
            interval=self.one_of(None, None, 1, 2, 0.5, 0.34),
            every_n_epochs=self.one_of(1, 1, 2),
            sanity=self.one_of(0, 0, 1),
            inference_mode=self.one_of(True, True, False),
            draws=self.chance(30),
        )

    def log(self, net: plan.Net, manual: bool, validation: Validates, missing_loss: str) -> plan.Log:
        places = ["training_step", "training_step", "training_step", "on_train_batch_end", "on_train_epoch_end"]
        places += ["on_train_batch_start", "on_train_epoch_start", "on_train_start"]
        if validation is not None:
            places += ["validation_step", "validation_step", "on_validation_epoch_end", "on_validation_epoch_start"]
        where = self.one_of(*places)
        in_step = where.endswith("_step") and not (where == "training_step" and (manual or missing_loss != "never"))
        kinds = ["number", "numpy", "large"]
        if where in ("on_train_epoch_end", "on_validation_epoch_end") and self.precision.endswith("-true"):
            kinds += ["forward", "forward"]
        if in_step:
            kinds = ["loss", "loss", "loss", *kinds, "metric"]
            if net.family == "mlp":
                kinds.append("pearson")
        if net.scale and not self.strategy.startswith(("fsdp", "hsdp", "deepspeed")):
            kinds += ["parameter", "parameter"]
        if net.buffer != "none" and where.startswith("on_train_batch"):
            kinds.append("buffer")
        what = self.one_of(*kinds)
        if what in ("metric", "pearson"):
            return plan.Log(where, what, on_step=False, on_epoch=True)
        on_step, on_epoch = self.one_of((False, True), (True, True), (True, False))
        if "epoch" in where or "on_train_start" in where or "validation" in where:
            on_step, on_epoch = False, True
        reduce_fx = self.one_of("mean", "mean", "sum", "max", "min") if on_epoch else "mean"
        batch_size = self.one_of(None, None, None, 3) if reduce_fx == "mean" else self.one_of(None, None, 0, 5)
        return plan.Log(where, what, on_step, on_epoch, reduce_fx, batch_size, self.one_of(None, None, True, False))

    def schedulers(
        self, validation: Validates, logs: Logs, changes: Changes, estimated: bool
    ) -> tuple[plan.Scheduler, ...]:
        if not self.chance(35):
            return ()
        kinds = ["step"]
        if not any(change.what == "group" for change in changes):
            kinds += ["warmup", "linear"] if estimated else ["warmup"]
        watched = next((log for log in logs if log.where == "validation_step"), None)
        if watched is not None and watched.what == "loss" and watched.sync_dist is not False:
            kinds.append("plateau")
        kind = self.one_of(*kinds)
        if kind == "linear":
            return (plan.Scheduler(kind, "step"),)
        interval = "epoch" if kind == "plateau" else self.one_of("epoch", "step")
        return (plan.Scheduler(kind, interval, self.one_of(1, 1, 2)),)

    def stop(self, missing_loss: str, single: bool) -> plan.Stop:
        if missing_loss in ("always", "nan"):
            return plan.Stop("should_stop", "on_train_batch_end", self.between(0, 3))
        how = self.one_of("max_steps", "skip", "raise", "should_stop")
        if how == "should_stop":
            hook = self.one_of("on_train_epoch_end", *(["on_train_batch_end"] if single else []))
            return plan.Stop(how, hook, self.between(0, 1))
        return plan.Stop(how, at=self.between(1, 5))

    def resume(self, ranks: int, data: plan.Data, validation: Validates, optimizers: Optimizers) -> plan.Resume:
        hooks = ["on_train_epoch_end", "on_train_batch_end", "on_train_batch_end", "on_train_batch_start"]
        hooks += ["on_validation_end"] if validation is not None else []
        hooks += [] if optimizers[0].evaluates_again else list(plan.WITHIN_STEPS)
        hook = self.one_of(*hooks)
        at = self.between(0, 3) if "batch" in hook or hook in plan.WITHIN_STEPS else 0
        within = validation is not None and validation.interval is not None
        if within or self.chance(50) or data.kind == "batch_sampler" or data.kind in plan.OWN_PARTS:
            return plan.Resume(hook, at, ranks, self.strategy)
        other = self.one_of("single_device", "ddp", "fsdp")
        if optimizers[0].kind == "lbfgs":
            other = self.one_of("single_device", "ddp")
        return plan.Resume(hook, at, 1 if other == "single_device" else self.one_of(2, 1, 3), other)

    def changed(self, optimizers: Optimizers, resume: plan.Resume) -> tuple[Optimizers, plan.Resume]:
        first, *rest = optimizers
        kinds = ["", "lr"]
        if not first.evaluates_again:
            kinds += ["weight_decay", "groups"]
            kinds += [] if first.closure else ["class"]
            kinds += ["amsgrad", "amsgrad"] if first.kind == "adamw" else []
            kinds += ["members"] if not rest and not resume.strategy.startswith("deepspeed") else []
        what = self.one_of(*kinds)
        if what == "groups":
            first = replace(first, split=self.chance(50))
        elif what == "amsgrad":
            first = replace(first, amsgrad=self.chance(50))
        elif what == "members":
            first = replace(first, of=self.one_of("all", "body"))
        return (first, *rest), replace(resume, changed=what, allow=self.chance(60))

    def average(self) -> plan.Average:
        return plan.Average(self.one_of(0.5, 0.9), self.one_of(0, 0, 2, 5), self.one_of(True, True, False))

    def evaluation(self, average: plan.Average | None, validation: Validates) -> plan.Evaluation:
        """Return an evaluation; of the averages only where there may be some."""
        hooks = ["on_fit_end", "on_train_batch_end", "on_train_epoch_end"]
        hooks += ["on_validation_end"] if validation is not None else []
        hook = self.one_of(*hooks)
        at = self.between(0, 3) if hook == "on_train_batch_end" else 0
        by = self.one_of("validate", "test", "load")
        ranks, other = 1, "single_device"
        if by != "load":
            other = self.one_of("single_device", "ddp", "fsdp", self.strategy)
            ranks = {"single_device": 1, "hsdp": 4}.get(other) or self.one_of(2, 1, 3)
        averaged = self.one_of(None, None, True, False) if average is not None else self.one_of(None, False)
        callbacks = average is not None and by != "load" and self.chance(30)
        return plan.Evaluation(by, hook, at, averaged, callbacks, ranks, other)

    def broadcast(self, manual: bool, net: plan.Net) -> bool | None:
        if not self.strategy.startswith("ddp"):
            return None
        if manual and net.buffer != "none":
            return bool(self.one_of(True, False))
        return self.one_of(None, None, None, False, True) if self.strategy == "ddp" else None


@st.composite
def programs(draw: Any, strategies: Sequence[str] = STRATEGIES) -> plan.Program:
    return Drawn(draw, strategies).program()
