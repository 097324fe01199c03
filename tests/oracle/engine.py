"""Runs the program under `Fit`, on one rank, and evaluates its checkpoint."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader

from averaging import Averaging, AveragingInContext
from drivetrain import Callback, CheckpointError, ConfigurationError, DrivetrainError, Fit, Strategy, TrainModule
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging
from drivetrain.checkpoint import SaveRequest
from drivetrain.loggers import Logger
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from oracle.data_loaders import Samples, first_of, parts_of, training_loader, validation_loader
from oracle.nets import DEVICE, apply_change, seeded_model, split, write
from oracle.optimizers import make_optimizer, make_scheduler
from oracle.outcome import Evaluated, Outcome, key_of, numbers_in, scheduler_state, value_of, whole
from oracle.planted_defects import planted
from oracle.program import EVALUATED, WITHIN_STEPS, Average, Evaluation, Program, Validation

QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class Planned(Exception):
    """An error that a program raises on purpose."""


class Trained(TrainModule):
    def __init__(self, program: Program, outcome: Outcome) -> None:
        super().__init__()
        self.program = program
        self.outcome = outcome
        self.net: Any = None
        if not program.configure_model:
            self.net = seeded_model(program)
        for number, log in enumerate(program.logs):
            kinds = {"metric": torchmetrics.MeanMetric, "pearson": torchmetrics.PearsonCorrCoef}
            if log.what in kinds:
                setattr(self, key_of(log, number), kinds[log.what]())
        if program.manual:
            self.automatic_optimization = False

    def configure_model(self) -> None:
        if self.net is None:
            self.net = seeded_model(self.program)
        if self.program.tensor_parallel > 1:
            split(self.net, self.device_mesh["tensor"])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        program = self.program
        parts = parts_of(batch, program.data.consumes_batch)
        if program.manual:
            return self.turns(parts, batch_idx)
        if program.missing_loss == "always" or (program.missing_loss == "odd" and batch_idx % 2):
            return None
        loss = self.net.loss(parts)
        if program.missing_loss == "nan":
            loss = loss * float("nan")
        self.log_values("training_step", loss, batch_idx, parts)
        if program.adds_to_loss:
            loss += self.net.penalty()
        return loss

    def turns(self, parts: Any, batch_idx: int) -> dict[str, Any]:
        held: Any = self.optimizers()
        optimizers = held if isinstance(held, list) else [held]
        loss = None
        for turn in self.program.manual:
            optimizer, part = optimizers[turn.optimizer], self.program.optimizers[turn.optimizer].of
            with self.toggled_optimizer(optimizer) if turn.toggles else contextlib.nullcontext():
                for _ in range(turn.repeats):

                    def closure() -> Tensor:
                        loss = self.net.loss_of_part(part, parts)  # noqa: B023
                        optimizer.zero_grad()  # noqa: B023
                        self.manual_backward(loss)
                        return loss

                    if turn.closure:
                        loss = optimizer.step(closure)
                        continue
                    loss = closure()
                    for _ in range(turn.clips):
                        self.clip_gradients(optimizer, 0.1, "norm")
                    optimizer.step()
        self.log_values("training_step", loss, batch_idx, parts)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.program.validation is not None
        parts = parts_of(batch, self.program.data.consumes_batch)
        if self.program.validation.draws:
            torch.rand(3)
        self.log_values("validation_step", self.net.loss(parts), batch_idx, parts)

    def log_values(self, where: str, loss: Tensor | None, at: int, parts: Any = None) -> None:
        for number, log in enumerate(self.program.logs):
            if log.where != where:
                continue
            key = key_of(log, number)
            value: Any = None
            if log.what in ("metric", "pearson"):
                value = getattr(self, key)
                if parts is not None:
                    numbers = (parts[2].float(),) if log.what == "metric" else (parts[0][:, 0], parts[1][:, 0])
                    value.update(*numbers)
            else:
                value = value_of(log, self.net, loss, at, self)
            options = {name: getattr(log, name) for name in ("on_step", "on_epoch", "batch_size", "sync_dist")}
            self.log(key, value, reduce_fx=log.reduce_fx, **options)

    def configure_optimizers(self) -> Any:
        program = self.program
        optimizers = [make_optimizer(self.net, program, plan) for plan in program.optimizers]
        if program.takes_closure:
            return {"optimizer": optimizers[0], "closure": True}
        schedulers = []
        for plan in program.schedulers:
            steps = self.trainer.estimated_stepping_batches if plan.kind == "linear" else 0
            scheduler = make_scheduler(optimizers[0], plan, int(steps))
            schedulers.append({"scheduler": scheduler, "interval": plan.interval, "frequency": plan.frequency})
            if plan.kind == "plateau":
                schedulers[-1] |= {"monitor": monitored(program), "strict": False}
        return optimizers, schedulers


class TokenWeighted(Trained):
    """A module that states the number of items over which its loss is a mean."""

    def batch_weight(self, batch: Any) -> float:
        return self.net.weight(parts_of(batch, False))


def user_module(program: Program, outcome: Outcome) -> Trained:
    """Return the module, which has no ``validation_step`` if the program does not validate."""
    kind: type[Trained] = TokenWeighted if program.token_weighted else Trained
    if program.validation is None:
        kind = type("WithoutValidation", (kind,), {"validation_step": TrainModule.validation_step})
    return kind(program, outcome)


def monitored(program: Program) -> str:
    """Return the key that a plateau scheduler monitors: that of the first value logged in validation."""
    number = next(number for number, log in enumerate(program.logs) if log.where == "validation_step")
    log = program.logs[number]
    return key_of(log, number) + ("_epoch" if log.on_step else "")


class RecordingLogger(Logger):
    name = "kept"
    version = "0"

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.outcome.flushes.append((step, dict(metrics)))


@dataclass(eq=False)
class Recorder(Callback):
    program: Program
    outcome: Outcome
    path: str = ""
    resumed: bool = False
    reseeds: bool = False
    calls: dict[str, int] = field(default_factory=dict)

    def in_hook(self, hook: str, trainer: Any, module: Any, batch_idx: int = 0) -> None:
        program, outcome = self.program, self.outcome
        if trainer.sanity_checking and hook != "on_sanity_check_start":
            return
        count = self.calls.get(hook, 0)
        self.calls[hook] = count + 1
        outcome.hooks.append(hook)
        module.log_values(hook, None, batch_idx)
        for change in program.changes:
            if change.hook == hook and change.epoch == trainer.current_epoch and change.batch == batch_idx:
                apply_change(module.net, change, trainer.optimizers[0])
        writes = program.writes
        if writes is not None and writes.hook == hook and writes.at == count:
            write(module.net, writes.what)
        stop, saving = program.stop, program.saving
        if stop is not None and stop.how == "should_stop" and stop.hook == hook and stop.at == count:
            trainer.should_stop = True
        if saving is not None and self.path and saving.hook == hook and saving.at == count:
            if hook == "on_fit_end" or hook in WITHIN_STEPS:
                trainer.save_checkpoint(self.path)
            else:
                trainer.save(lambda: SaveRequest(self.path))

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if not self.resumed or self.reseeds:
            torch.manual_seed(1000 + 100 * self.resumed + trainer.global_rank // self.program.tensor_parallel)
        self.outcome.planned = trainer.estimated_stepping_batches
        self.in_hook("on_train_start", trainer, module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        index = [] if trainer.joining else first_of(batch)["index"].tolist()
        stop = self.program.stop
        self.in_hook("on_train_batch_start", trainer, module, batch_idx)
        if stop is not None and stop.how == "skip" and stop.at == batch_idx:
            return -1
        if stop is not None and stop.how == "raise" and stop.at == self.calls["on_train_batch_start"] - 1:
            raise Planned("as planned")
        self.outcome.samples.append((trainer.current_epoch, index))
        return None

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.program.measures_norms and (self.program.manual or optimizer is trainer.optimizers[0]):
            measured = [optimizer] if self.program.manual else trainer.optimizers
            norm = float(trainer.strategy.clip_gradients(measured, 1e30))  # a bound that is never reached
            self.outcome.step_norms.append(norm if math.isfinite(norm) else math.inf)
        self.outcome.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        self.in_hook("on_before_optimizer_step", trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.shards_parameters:
            self.outcome.steps.append((trainer.global_step, torch.zeros(0)))
        else:
            held = [one.detach().flatten().double() for one in module.net.parameters()]
            self.outcome.steps.append((trainer.global_step, torch.cat(held)))
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.outcome.losses.append(math.nan if trainer.joining or loss is None else float(loss))
        precision = trainer.strategy.precision
        if precision.name == "16-mixed":
            self.outcome.scales.append(precision.state_dict()["scale"])
        if self.program.records_norms:
            norm = trainer.gradient_norm
            self.outcome.norms.append(math.nan if norm is None else float(norm))
        self.in_hook("on_train_batch_end", trainer, module, batch_idx)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.in_hook("on_train_end", trainer, module)
        outcome, strategy = self.outcome, trainer.strategy
        for number in range(len(trainer.optimizers)):
            states = strategy.optimizer_state(number)["state"]
            outcome.states.append({name.removeprefix("net."): numbers_in(state) for name, state in states.items()})
        outcome.schedulers = [scheduler_state(one) for one in trainer.lr_schedulers]
        outcome.counts, outcome.metrics = counts(trainer), metrics(trainer)


def add_hook(name: str, batch_idx: int | None = None) -> None:
    """Let `Recorder` do in the hook what is common to every hook; ``batch_idx`` is the place of that argument."""

    def hook(self: Recorder, trainer: Any, module: Any, *arguments: Any) -> None:
        self.in_hook(name, trainer, module, 0 if batch_idx is None else arguments[batch_idx])

    setattr(Recorder, name, hook)


for _name in (
    "train_epoch_start",
    "before_zero_grad",
    "before_backward",
    "after_backward",
    "train_epoch_end",
    "fit_end",
):
    add_hook(f"on_{_name}")
for _name in ("start", "epoch_start", "epoch_end", "end"):
    add_hook(f"on_validation_{_name}")
add_hook("on_validation_batch_start", 1)
add_hook("on_validation_batch_end", 2)


def counts(trainer: Any) -> dict[str, int]:
    return {
        "steps": trainer.global_step,
        "epochs": trainer.run_state.progress.epoch,  # those that were completely trained on
        "micro_batches": trainer.micro_batches,
        "samples": trainer.samples_seen,
    }


def metrics(trainer: Any) -> dict[str, float]:
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


@contextlib.contextmanager
def quiet_loggers() -> Iterator[None]:
    """Log only errors within the context: other tests use these ranks too."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def run(program: Program, root: str, resumed: bool, plant: str = "") -> Outcome:
    """Train ``program`` on this rank, in a run folder below ``root`` if there is one, or resume in that folder.

    If `Fit` starts the processes, the outcome is what comes back to the caller.
    """
    path = saved_in(root) if root else ""
    outcome = Outcome()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    rank //= program.tensor_parallel
    ranks, strategy = 1 if program.launcher else program.ranks, program.strategy
    reseeds = False
    allow: tuple[str, ...] = ()
    if resumed:
        assert program.resume is not None
        ranks, strategy = program.resume.ranks, program.resume.strategy
        reseeds = ranks != program.ranks
        allow = ("optimizer",) if program.resume.allow else ()
        program = replace(program, optimizers=program.resume.optimizers(program.optimizers))
    with quiet_loggers(), warnings.catch_warnings(), planted(plant):
        warnings.simplefilter("ignore")
        module = user_module(program, outcome)
        recorder = Recorder(program, outcome, "" if resumed else path, resumed, reseeds)
        trainer = None
        try:
            callbacks: list[Callback] = [recorder, Checkpoint(save_top_k=0)] if root else [recorder]
            if program.average is not None:
                callbacks.append(averaging(program.average))
            options = {**settings(program, outcome), **({"default_root_dir": root} if root else {})}
            trainer = Fit(strategy=strategy_of(strategy, program), callbacks=callbacks, **options)
            training = training_loader(program, ranks, rank)
            validation = None if program.validation is None else validation_loader(program, ranks, rank)
            trainer.fit(module, training, validation, ckpt_path=path if resumed else None, allow=allow)
            if program.launcher:
                outcome.counts, outcome.metrics = counts(trainer), metrics(trainer)
            assert not root or trainer.log_dir == path.rpartition("/checkpoints/")[0]
        except Exception as error:
            if ranks > 1 and not isinstance(error, (DrivetrainError, Planned)):
                raise  # the others wait for this rank: the world ends them, and reports this error
            outcome.error, outcome.text = type(error).__name__, str(error)
            if not outcome.counts and trainer is not None:
                with contextlib.suppress(Exception):
                    outcome.counts = counts(trainer)
    outcome.weights = weights_of(module)
    return outcome


def weights_of(module: Trained) -> dict[str, Tensor]:
    return {} if module.net is None else {name: whole(value) for name, value in module.net.state_dict().items()}


def saved_in(root: str) -> str:
    return f"{root}/drivetrain_logs/version_0/checkpoints/saved"


def averaging(plan: Average) -> Callback:
    return EMAWeightAveraging(
        plan.decay, update_starting_at_step=plan.start or None, use_buffers=False, evaluate=plan.evaluates
    )


class Scored(Trained):
    """The user's module, whose steps of evaluation log the loss alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.net.loss(parts_of(batch, False)))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def evaluate(program: Program, root: str, plant: str = "") -> Evaluated:
    """Evaluate the checkpoint that the program has saved in the run folder below ``root``."""
    plan = program.evaluation
    assert plan is not None
    averaged: dict[str, Any] = {} if plan.averaged is None else {"averaged": plan.averaged}
    with quiet_loggers(), warnings.catch_warnings(), planted(plant):
        warnings.simplefilter("ignore")
        try:
            if plan.by == "load":
                outcome = Outcome()
                module = Scored.load_from_checkpoint(saved_in(root), program=program, outcome=outcome, **averaged)
                return Evaluated(weights=weights_of(module))
            return evaluate_under_fit(program, plan, root, averaged)
        except (ConfigurationError, CheckpointError) as error:
            return Evaluated(refused=True, text=str(error))


def evaluate_under_fit(program: Program, plan: Evaluation, root: str, averaged: dict[str, Any]) -> Evaluated:
    module = Scored(program, Outcome())
    trainer = Fit(
        strategy=strategy_of(plan.strategy, program),
        accelerator="cpu",
        precision=program.precision,
        callbacks=[averaging(program.average)] if program.average is not None and plan.callbacks else [],
        logger=False,
        **QUIET,
        seed=program.seed,
    )
    loader = DataLoader(Samples(EVALUATED.data, program.net.on_tokens), EVALUATED.batch)
    run = trainer.test if plan.by == "test" else trainer.validate
    scores = run(module, loader, ckpt_path=saved_in(root), verbose=False, **averaged)
    loss = scores[0]["score"] if scores else math.nan
    # DeepSpeed's engine leaves the parameters rounded to half precision.
    return Evaluated(loss, {} if plan.strategy.startswith("deepspeed") else weights_of(module))


VARIANTS: dict[str, Callable[[], Strategy]] = {
    # K-01: with public names only, as in a third-party package.
    "averaging": Averaging,
    "averaging_in_context": AveragingInContext,
    # Several units on two by two ranks are tested in test_fsdp_meshes.py.
    "hsdp_one_unit": lambda: FSDPStrategy(sharding="hybrid", wrap=[]),
    "fsdp_tensor_parallel": lambda: FSDPStrategy(tensor_parallel=2, wrap=[]),
}


def strategy_of(name: str, program: Program) -> Any:
    if name in VARIANTS:
        return VARIANTS[name]()
    if name.startswith("ddp") and program.broadcast is not None:
        return DDPStrategy(
            broadcast_buffers=program.broadcast,
            static_graph=name == "ddp_static_graph",
            find_unused_parameters=name == "ddp_find_unused_parameters_true",
        )
    if name.startswith("deepspeed") and not name.endswith("_offload"):
        # A single sample is not normalised: gradients then arrive in another order, which would be refused.
        unordered = name == "deepspeed_stage_2" and program.net.norm == "batch"
        options: dict[str, Any] = {"find_unused_parameters": True} if unordered else {}
        if not program.optimizers[0].is_torch:
            options["config"] = {"zero_allow_untested_optimizer": True}
        if name == "deepspeed_stage_3_all_sharded":  # small parameters too, which stay whole by default (E-13)
            options["stage3_param_persistence_threshold"] = 0
        return DeepSpeedStrategy(stage=int(name.split("_")[2]), **options) if options else name
    return name


def settings(program: Program, outcome: Outcome) -> dict[str, Any]:
    validation, stop = program.validation or Validation(), program.stop
    options: dict[str, Any] = {
        "accelerator": DEVICE,
        "precision": program.precision,
        "logger": RecordingLogger(outcome),
        "log_every_n_steps": program.log_every,
        **QUIET,
        "max_epochs": program.epochs,
        "max_steps": stop.at if stop is not None and stop.how == "max_steps" else -1,
        "accumulate_grad_batches": program.accumulate,
        "num_sanity_val_steps": validation.sanity,
        "seed": program.seed,
        "val_check_interval": validation.interval,
        "check_val_every_n_epoch": validation.every_n_epochs,
        "inference_mode": validation.inference_mode,
    }
    if program.launcher:
        options |= {"logger": False, "launcher": program.launcher, "devices": program.ranks}
    if DEVICE != "cpu":
        options["devices"] = torch.distributed.get_world_size()
    if program.clip is not None:
        options |= {"gradient_clip_val": program.clip, "gradient_clip_algorithm": program.clip_by}
    return options
