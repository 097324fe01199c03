"""DeviceStatsMonitor: logs statistics of the device's memory allocator and of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from drivetrain._runtime.lazy_names import import_optional
from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext


class DeviceStatsMonitor(Callback):
    """Logs the statistics of rank 0's device, before and after every ``log_every_n_steps``-th optimizer step.

    Keys are ``DeviceStatsMonitor.on_train_batch_start/<name>`` and ``DeviceStatsMonitor.on_train_batch_end/<name>``.
    On CUDA the names are those of `torch.cuda.memory_stats`, such as ``allocated_bytes.all.current`` and
    ``num_alloc_retries``. On MPS the statistics are the allocated bytes. Host statistics, which need psutil, are
    ``cpu_percent`` since the previous reading, ``cpu_vm_percent`` (memory) and ``cpu_swap_percent``. Reading statistics
    never waits for the device.

    Args:
        cpu_stats: whether to log host statistics; None logs them if the module runs on the CPU.

    Raises:
        ConfigurationError: as training starts, if psutil is needed but not installed.
    """

    _key_arguments = ("cpu_stats",)

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats
        self._log_every_n_steps = 0  # 0 logs nothing
        self._step_awaiting_end = 0  # the step of which only the statistics before the step are logged; 0 for none
        self._logs_host_stats = False

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Determine whether to log host statistics."""
        device = trainer.strategy.device
        self._logs_host_stats = self.cpu_stats or (self.cpu_stats is None and device.type == "cpu")

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Determine after how many steps to log."""
        self._log_every_n_steps = trainer.log_every_n_steps if trainer.is_global_zero else 0
        self._step_awaiting_end = 0
        if self._log_every_n_steps and self._logs_host_stats:
            self.stats(trainer.strategy.device)  # psutil's cpu_percent is relative to the previous call.

    def on_train_batch_start(self, trainer: RunContext, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Log the statistics before every ``log_every_n_steps``-th step."""
        step = trainer.global_step + 1
        if self._log_every_n_steps and step % self._log_every_n_steps == 0 and step != self._step_awaiting_end:
            self._step_awaiting_end = step
            self._log(trainer, "on_train_batch_start", step)

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the statistics after every ``log_every_n_steps``-th step."""
        if self._step_awaiting_end and trainer.global_step == self._step_awaiting_end:
            self._step_awaiting_end = 0
            self._log(trainer, "on_train_batch_end", trainer.global_step)

    def stats(self, device: torch.device) -> dict[str, float]:
        """Return the current statistics by name."""
        reader = _reader(device)
        statistics: dict[str, float] = {} if reader is None else dict(reader())
        if self._logs_host_stats:
            psutil = import_optional("psutil", "DeviceStatsMonitor", "pip install psutil, or pass cpu_stats=False")
            statistics["cpu_percent"] = psutil.cpu_percent()
            statistics["cpu_vm_percent"] = psutil.virtual_memory().percent
            statistics["cpu_swap_percent"] = psutil.swap_memory().percent
        return statistics

    def _log(self, trainer: RunContext, moment: str, step: int) -> None:
        name = type(self).__qualname__
        values = {f"{name}.{moment}/{key}": value for key, value in self.stats(trainer.strategy.device).items()}
        trainer.log_metrics(values, step=step)


def _reader(device: torch.device) -> Any:
    """Return a function that returns the device's statistics by name; None if torch has no statistics."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    if hasattr(module, "memory_stats"):
        return lambda: module.memory_stats(device)
    names = [name for name in ("current_allocated_memory", "driver_allocated_memory") if hasattr(module, name)]  # MPS
    return (lambda: {name: getattr(module, name)() for name in names}) if names else None
