"""DeviceStatsMonitor: what the device's allocator and the host say of themselves, beside the loss."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._runtime.lazy_names import is_installed
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext


class DeviceStatsMonitor(Callback):
    """Logs the statistics of rank 0's device, before and after every ``log_every_n_steps``-th optimizer step.

    Keys are ``DeviceStatsMonitor.on_train_batch_start/<name>`` and ``DeviceStatsMonitor.on_train_batch_end/<name>``.
    On CUDA the names are those of `torch.cuda.memory_stats`: ``allocated_bytes.all.current``, ``num_alloc_retries``
    and so on; on MPS there are the bytes that are allocated. Of the host, with psutil: ``cpu_percent`` since the last
    look, ``cpu_vm_percent`` (memory) and ``cpu_swap_percent``. Nothing waits for the device.

    Args:
        cpu_stats: log the host's too; ``None`` does so where the module computes on the CPU, ``False`` never.

    Raises:
        ConfigurationError: as a run begins: psutil is not installed and wanted, or there is nothing to log.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats
        self._every = 0  # nothing is logged
        self._begun = 0  # the step before which something was logged
        self._of_host = False

    @property
    def state_key(self) -> str:
        """The class and its setting."""
        return f"{type(self).__qualname__}{{'cpu_stats': {self.cpu_stats!r}}}"

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Refuse what cannot be logged."""
        device = trainer.strategy.device
        self._of_host = self.cpu_stats or (self.cpu_stats is None and device.type == "cpu")
        if self._of_host and not is_installed("psutil"):
            raise ConfigurationError(
                f"DeviceStatsMonitor(cpu_stats={self.cpu_stats!r}) on {str(device)!r} needs psutil, which is not "
                "installed.",
                "the host's statistics come from that package.",
                "pip install psutil" + (", or give cpu_stats=False." if device.type != "cpu" else ", or leave it out."),
            )
        if not self._of_host and _reader(device) is None:
            raise ConfigurationError(
                f"DeviceStatsMonitor(cpu_stats={self.cpu_stats!r}) has nothing to log on {str(device)!r}.",
                "torch keeps no statistics of memory for this kind of device.",
                "give cpu_stats=True for the host's, or leave it out.",
            )

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Settle when to log."""
        self._every = trainer.log_every_n_steps if trainer.is_global_zero else 0
        self._begun = 0
        if self._every and not trainer.loggers:
            self._every = 0
            warnings.warn("DeviceStatsMonitor has nowhere to log to: the run has no logger", stacklevel=2)
        if self._every and self._of_host:
            self.stats(trainer.strategy.device)  # from here on psutil counts

    def on_train_batch_start(self, trainer: RunContext, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Log as the coming step begins, once a step however many micro-batches it has."""
        step = trainer.global_step + 1
        if self._every and step % self._every == 0 and step != self._begun:
            self._begun = step
            self._log(trainer, "on_train_batch_start", step)

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Log once the step is made."""
        if self._begun and trainer.global_step == self._begun:
            self._begun = 0
            self._log(trainer, "on_train_batch_end", trainer.global_step)

    def stats(self, device: torch.device) -> dict[str, float]:
        """The values as of now, by name."""
        reader = _reader(device)
        found: dict[str, float] = {} if reader is None else dict(reader())
        if self._of_host:
            psutil: Any = importlib.import_module("psutil")  # by who wants it
            found["cpu_percent"] = psutil.cpu_percent()
            found["cpu_vm_percent"] = psutil.virtual_memory().percent
            found["cpu_swap_percent"] = psutil.swap_memory().percent
        return found

    def _log(self, trainer: RunContext, moment: str, step: int) -> None:
        name = type(self).__qualname__
        values = {f"{name}.{moment}/{key}": value for key, value in self.stats(trainer.strategy.device).items()}
        trainer.log_metrics(values, step=step)


def _reader(device: torch.device) -> Any:
    """Return what gives a device's statistics by name; None where torch keeps none."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    if hasattr(module, "memory_stats"):
        return lambda: module.memory_stats(device)
    names = [name for name in ("current_allocated_memory", "driver_allocated_memory") if hasattr(module, name)]  # MPS
    return (lambda: {name: getattr(module, name)() for name in names}) if names else None
