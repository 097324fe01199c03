"""Hypothesis strategies that draw programs: every choice shrinks to the simplest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from cpu_kernels import FP16
from oracle.program import (
    OWN_PARTS,
    WITHIN_STEPS,
    Average,
    Change,
    Data,
    Evaluation,
    Log,
    Net,
    Optimizer,
    Program,
    Resume,
    Scheduler,
    Stop,
    Turn,
    Validation,
    Write,
)

STRATEGIES = ("single_device", "ddp", "fsdp", "ddp_static_graph", "ddp_find_unused_parameters_true", "fsdp_grad_op")
ZERO = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")

ONE_WORKER = ("reused", "stateful", "combined")
"""Kinds of data that the process itself reads."""

PRECISIONS = ("32-true", "32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true")
ZERO_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed") if FP16 else ("32-true", "bf16-mixed")


Optimizers = tuple[Optimizer, ...]


class Drawn:
    def __init__(self, draw: Any, strategies: Sequence[str]) -> None:
        self.draw = draw
        self.strategies = strategies

    def one_of(self, *choices: Any) -> Any:
        """Choose one of the options; the first is the simplest."""
        return self.draw(st.sampled_from(choices))

    def chance(self, percent: int) -> bool:
        """Return True with the given probability."""
        return bool(self.draw(st.integers(0, 99)) >= 100 - percent)

    def between(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def program(self) -> Program:
        if "ddp" in self.strategies and self.chance(7):
            return self.launched()
        self.strategy = strategy = self.one_of(*self.strategies)
        ranks = {"single_device": 1, "hsdp": 4}.get(strategy) or self.one_of(2, 2, 2, 1, 3)
        precision = self.one_of(*PRECISIONS)
        if strategy.startswith("deepspeed"):
            precision = self.one_of(*ZERO_PRECISIONS)
        self.precision, self.zero = precision, strategy.startswith("deepspeed")
        manual = not strategy.startswith(("ddp_static", "deepspeed")) and self.chance(30)
        epochs = self.one_of(1, 2, 2, 3)
        single = ranks == 1 and strategy == "single_device"
        validation = self.validation(ranks) if self.chance(45) else None
        net = self.net()
        optimizers = self.optimizers(net, manual)
        changes: tuple[Change, ...] = ()
        if epochs > 1 and not net.tied and not self.zero and self.chance(25):
            net, optimizers, changes = self.changes(net, epochs, optimizers)
        data = self.data(ranks)
        closure = optimizers[0].evaluates_again or optimizers[0].closure
        missing_loss = "never"
        if single and not manual and not closure and not changes and self.chance(12):
            missing_loss = (
                self.one_of("odd", "always", "nan") if precision == "16-mixed" else self.one_of("odd", "always")
            )
        logs = tuple(self.log(net, manual, validation, missing_loss) for _ in range(self.between(0, 3)))
        writes = None
        if missing_loss == "never" and not closure and not changes and self.chance(15):
            writes = self.writes(manual)
        stop = (
            self.stop(missing_loss, single, epochs, validation) if missing_loss != "never" or self.chance(20) else None
        )
        resume = None
        if stop is None and missing_loss == "never" and not changes and writes is None and self.chance(18):
            resume = self.resume(ranks, data, validation, optimizers)
            if resume is not None and resume.ranks != ranks and (net.dropout or data.drop_last):
                # Ranks draw other masks, and another number of ranks drops other samples.
                resume = Resume(resume.hook, resume.at, ranks, strategy)
            if resume is not None and self.chance(60):
                optimizers, resume = self.changed(optimizers, resume)
            if resume is not None:  # a resumed run calls on_train_start again
                logs = tuple(log for log in logs if log.where != "on_train_start")
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
        return Program(
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

    def launched(self) -> Program:
        """Return a small program whose processes are started by a launcher."""
        return Program(
            strategy="ddp",
            ranks=2,
            precision=self.one_of("64-true", "bf16-true", "32-true"),
            net=Net(norm=self.one_of("none", "batch"), buffer=self.one_of("none", "in_place")),
            data=Data(samples=self.between(4, 9), shuffle=True),
            optimizers=(Optimizer("adamw"),),
            logs=(Log(on_epoch=True),),
            configure_model=self.chance(50),
            launcher="fork",
        )

    def net(self) -> Net:
        family = (
            "mlp" if self.precision in ("16-mixed", "bf16-true") else self.one_of("mlp", "mlp", "gru", "transformer")
        )
        tied = family != "mlp" and self.chance(25)
        return Net(
            family=family,
            norm=self.one_of("none", "batch", "layer") if family == "mlp" else "none",
            dropout=self.one_of(0.0, 0.3),
            buffer=self.one_of("none", "in_place", "reassigned"),
            scale=self.chance(25),
            unused=self.chance(5),
            tied=tied,
            hooked=self.chance(8),
        )

    def data(self, ranks: int) -> Data:
        kind = self.one_of("map", "map", "map", "sampler", "batch_sampler", "iterable", "reused")
        samples = self.between(4, 14)
        if kind == "iterable" and self.chance(20):
            kind = "sharded"
        elif kind == "iterable" and self.chance(50):
            kind = self.one_of("stateful", "combined") if ranks == 1 else "stateful"
        if kind in OWN_PARTS:
            samples = self.between(4 * ranks, 8 * ranks)
        own = kind == "batch_sampler" or kind in OWN_PARTS
        return Data(
            kind=kind,
            samples=samples,
            batch=self.between(1, 4),
            shuffle=kind == "map" and self.chance(60),
            drop_last=kind == "map" and samples >= 12 and self.chance(10),
            consumes_batch=self.chance(20),
            workers=2
            if kind == "sharded" or (kind not in ("reused", "stateful", "combined") and self.chance(4))
            else 0,
            fewest_on_rank_0=kind in OWN_PARTS and ranks > 1 and self.chance(60),
            length_error=self.one_of(0, 0, None, -2, -1, 2) if own else 0,
        )

    def optimizers(self, net: Net, manual: bool) -> Optimizers:
        lr = self.one_of(0.1, 0.05)
        kind = self.one_of("sgd", "momentum", "adamw", "adamw")
        if (
            self.precision in ("32-true", "64-true", "bf16-mixed")
            and not net.dropout
            and not self.zero
            and self.chance(12)
        ):
            # A line search amplifies rounding.
            kinds = ("sam", "sam_sum") if self.precision == "bf16-mixed" else ("lbfgs", "sam", "sam_sum")
            return (Optimizer(self.one_of(*kinds), "all", lr),)
        if self.chance(8):
            kind = self.one_of("optimistic", "heun")
            exact = self.precision in ("32-true", "64-true", "bf16-mixed")
            closure = kind == "optimistic" and exact and not manual and not self.zero and self.chance(30)
            return (Optimizer(kind, "all", lr, split=self.chance(10), closure=closure),)
        if net.tied or self.zero or not self.chance(50 if manual else 20):
            return (Optimizer(kind, "all", lr, split=self.chance(10)),)
        return (Optimizer(kind, "body", lr), Optimizer(self.one_of("sgd", "adamw"), "head", lr))

    def turns(self, optimizers: Optimizers) -> tuple[Turn, ...]:
        if optimizers[0].evaluates_again:
            return (Turn(closure=True),)
        toggles = len(optimizers) > 1 and self.chance(30)
        turns = []
        scales = self.precision == "16-mixed"  # combinations in which the number of steps or clips matters
        for _ in range(self.between(1, 2)):
            for number in range(len(optimizers)):
                clips = self.one_of(0, 1, 2) if scales else self.one_of(0, 0, 1, 2)
                closure = not clips and (optimizers[number].is_torch or not scales) and self.chance(15)
                steps = self.one_of(2, 1) if scales else self.one_of(1, 1, 2)
                turns.append(Turn(number, steps, clips, toggles, closure))
        return tuple(turns)

    def changes(self, net: Net, epochs: int, optimizers: Optimizers) -> tuple[Net, Optimizers, tuple[Change, ...]]:
        part = self.one_of("body", "head")
        what = self.one_of("unfreeze", "unfreeze", "group", "freeze")
        hook = self.one_of(
            "on_train_epoch_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_start", "on_validation_end"
        )
        epoch = 0 if hook != "on_train_epoch_start" else self.between(1, epochs - 1)
        changes = [Change(what, part, hook, epoch)]
        if what != "freeze":
            net = Net(**{**vars(net), "frozen": part})
            if hook == "on_train_epoch_start" and epoch == 1 and epochs > 2 and self.chance(40):
                changes.append(Change("freeze", part, hook, 2))
        lr, kind = optimizers[0].lr, optimizers[0].kind
        kind = "adamw" if optimizers[0].evaluates_again else kind
        return net, (Optimizer(kind, "all", lr, closure=optimizers[0].closure),), tuple(changes)

    def writes(self, manual: bool) -> Write:
        what = self.one_of("weights", "data", "assigned", "gradients", "rebound")
        if what in ("gradients", "rebound"):
            return Write(what, self.one_of("on_before_optimizer_step", "on_after_backward"), self.between(0, 2))
        return Write(what, self.one_of("on_train_batch_end", "on_train_epoch_start"), self.between(0, 1))

    def validation(self, ranks: int) -> Validation:
        kind = self.one_of("map", "map", "map", "map", "iterable")
        sharded = kind == "iterable" and self.chance(20)
        return Validation(
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

    def log(self, net: Net, manual: bool, validation: Validation | None, missing_loss: str) -> Log:
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
            return Log(where, what, on_step=False, on_epoch=True)
        on_step, on_epoch = self.one_of((False, True), (True, True), (True, False))
        if "epoch" in where or "on_train_start" in where or "validation" in where:
            on_step, on_epoch = False, True
        reduce_fx = self.one_of("mean", "mean", "sum", "max", "min") if on_epoch else "mean"
        batch_size = self.one_of(None, None, None, 3) if reduce_fx == "mean" else self.one_of(None, None, 0, 5)
        return Log(where, what, on_step, on_epoch, reduce_fx, batch_size, self.one_of(None, None, True, False))

    def schedulers(
        self, validation: Validation | None, logs: tuple[Log, ...], changes: tuple[Change, ...], estimated: bool
    ) -> tuple[Scheduler, ...]:
        if not self.chance(35):
            return ()
        kinds = ["step"]
        if not any(change.what == "group" for change in changes):
            kinds.append("warmup")
            kinds += ["linear"] if estimated else []
        watched = next((log for log in logs if log.where == "validation_step"), None)
        watches = watched is not None and watched.what == "loss" and watched.sync_dist is not False
        if watches:
            kinds.append("plateau")
        kind = self.one_of(*kinds)
        if kind == "linear":
            return (Scheduler(kind, "step"),)
        interval = "epoch" if kind == "plateau" else self.one_of("epoch", "step")
        return (Scheduler(kind, interval, self.one_of(1, 1, 2)),)

    def stop(self, missing_loss: str, single: bool, epochs: int, validation: Validation | None) -> Stop | None:
        if missing_loss in ("always", "nan"):
            return Stop("should_stop", "on_train_batch_end", self.between(0, 3))
        how = self.one_of("max_steps", "skip", "raise", "should_stop")
        if how == "should_stop":
            hooks = ["on_train_epoch_end"]
            hooks += ["on_train_batch_end"] if single else []
            return Stop(how, self.one_of(*hooks), self.between(0, 1))
        return Stop(how, at=self.between(1, 5))

    def resume(self, ranks: int, data: Data, validation: Validation | None, optimizers: Optimizers) -> Resume | None:
        hooks = ["on_train_epoch_end", "on_train_batch_end", "on_train_batch_end", "on_train_batch_start"]
        hooks += ["on_validation_end"] if validation is not None else []
        hooks += [] if optimizers[0].evaluates_again else list(WITHIN_STEPS)
        hook = self.one_of(*hooks)
        at = self.between(0, 3) if "batch" in hook or hook in WITHIN_STEPS else 0
        within = validation is not None and validation.interval is not None
        if within or self.chance(50) or data.kind == "batch_sampler" or data.kind in OWN_PARTS:
            return Resume(hook, at, ranks, self.strategy)
        other = self.one_of("single_device", "ddp", "fsdp")
        if optimizers[0].kind == "lbfgs":
            other = self.one_of("single_device", "ddp")
        return Resume(hook, at, 1 if other == "single_device" else self.one_of(2, 1, 3), other)

    def changed(self, optimizers: Optimizers, resume: Resume) -> tuple[Optimizers, Resume]:
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

    def average(self) -> Average:
        return Average(self.one_of(0.5, 0.9), self.one_of(0, 0, 2, 5), self.one_of(True, True, False))

    def evaluation(self, average: Average | None, validation: Validation | None) -> Evaluation:
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
        return Evaluation(by, hook, at, averaged, callbacks, ranks, other)

    def broadcast(self, manual: bool, net: Net) -> bool | None:
        if not self.strategy.startswith("ddp"):
            return None
        if manual and net.buffer != "none":
            return bool(self.one_of(True, False))
        return self.one_of(None, None, None, False, True) if self.strategy == "ddp" else None


@st.composite
def programs(draw: Any, strategies: Sequence[str] = STRATEGIES) -> Program:
    return Drawn(draw, strategies).program()
