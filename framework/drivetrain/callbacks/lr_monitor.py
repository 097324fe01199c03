"""LearningRateMonitor: logs learning rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from drivetrain._config.argument_checks import check_choice
from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_INTERVALS = ("step", "epoch")


@dataclass(eq=False, repr=False)
class LearningRateMonitor(Callback):
    """Logs the learning rate of every parameter group, on rank 0.

    The key is the ``"name"`` of the optimizer's scheduler or ``lr-<class>``, such as ``lr-AdamW``. A second optimizer
    of the same class has the key ``lr-AdamW-1``. For a parameter group with a ``"name"``, ``/<name>`` is appended to
    the key. For groups without a name, ``/pg1``, ``/pg2``, ... is appended if the optimizer has several groups. The
    value at step n is the learning rate used in step n.

    Args:
        logging_interval: "step" logs every ``log_every_n_steps`` steps, "epoch" at the start of each epoch; None logs
            by steps if any scheduler has the interval "step", and otherwise by epochs.
        log_momentum: whether to log momentum, or Adam's first beta, as ``<key>-momentum``.
        log_weight_decay: whether to log weight decay, as ``<key>-weight_decay``.

    Raises:
        ConfigurationError: ``logging_interval`` is unknown.
    """

    _key_arguments = ("logging_interval", "log_momentum", "log_weight_decay")

    logging_interval: str | None = None
    log_momentum: bool = False
    log_weight_decay: bool = False

    def __post_init__(self) -> None:
        if self.logging_interval is not None:
            meaning = "whether learning rates are logged by steps or by epochs, or None"
            check_choice("LearningRateMonitor", "logging_interval", self.logging_interval, _INTERVALS, meaning)
        self._log_every_n_steps = 1
        self._by_step = self._by_epoch = False
        self._last_logged_step = -1
        self.lrs: dict[str, list[float]] = {}
        """The logged values of each learning rate in this run, oldest first."""

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Determine whether to log by steps or by epochs."""
        self.lrs = {}
        self._by_step = self._by_epoch = False
        self._log_every_n_steps = trainer.log_every_n_steps
        if not self._log_every_n_steps:  # Nothing is logged in this run.
            return
        intervals = {config.interval for config in trainer.lr_scheduler_configs} or {"epoch"}
        self._by_step = self.logging_interval == "step" or (self.logging_interval is None and "step" in intervals)
        self._by_epoch = not self._by_step
        self._last_logged_step = -1

    def on_train_epoch_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Log the learning rates of the epoch."""
        if self._by_epoch:
            trainer.log_metrics(self._record_rates(trainer), step=trainer.global_step)

    def on_train_batch_start(self, trainer: RunContext, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Log the learning rates of the step, before the step's first micro-batch."""
        if not self._by_step:
            return
        step = trainer.global_step + 1
        if step % self._log_every_n_steps == 0 and step != self._last_logged_step:
            self._last_logged_step = step
            trainer.log_metrics(self._record_rates(trainer), step=step)

    def _record_rates(self, trainer: RunContext) -> dict[str, float]:
        rates = self.rates(trainer)
        for name, value in rates.items():
            if not name.endswith(("-momentum", "-weight_decay")):
                self.lrs.setdefault(name, []).append(value)
        trainer.metrics.restore(rates)  # as values of `callback_metrics`
        return rates

    def rates(self, trainer: RunContext) -> dict[str, float]:
        """Return the current learning rates, and momentum and weight decay if they are logged, by key."""
        names = {id(config.scheduler.optimizer): config.name for config in trainer.lr_scheduler_configs if config.name}
        values: dict[str, float] = {}
        seen: dict[str, int] = {}
        for optimizer in trainer.optimizers:
            key = names.get(id(optimizer)) or f"lr-{type(optimizer).__name__}"
            occurrence = seen.get(key, 0)
            seen[key] = occurrence + 1
            values |= self._optimizer_values(optimizer, f"{key}-{occurrence}" if occurrence else key)
        return values

    def _optimizer_values(self, optimizer: Optimizer, key: str) -> dict[str, float]:
        """Return the values to log for each parameter group of one optimizer, by key."""
        values: dict[str, float] = {}
        groups = optimizer.param_groups
        for index, group in enumerate(groups, start=1):
            name = f"{key}/{group['name']}" if "name" in group else f"{key}/pg{index}" if len(groups) > 1 else key
            values[name] = float(group["lr"])
            if self.log_momentum:
                betas = group.get("betas")
                values[f"{name}-momentum"] = float(betas[0] if betas is not None else group.get("momentum", 0.0))
            if self.log_weight_decay:
                values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return values
