"""ThroughputMonitor: logs samples, tokens and FLOPs per second, and model FLOPs utilization (MFU)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drivetrain._config.argument_checks import check_count, check_types
from drivetrain._loops.hooks import is_overridden
from drivetrain.callback import Callback
from drivetrain.module.train_module import TrainModule

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from drivetrain.run_context import RunContext


# The peak FLOP/s of each GPU without sparsity in 16 bit, TF32 and float32, from the vendors' data sheets. A device has
# the peaks of the first entry whose name matches.
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("B200", (2250e12, 1100e12, 75e12)),
    ("H200", (989e12, 494e12, 67e12)),
    ("H100 PCIe", (756e12, 378e12, 51e12)),
    ("H100 NVL", (835e12, 417e12, 60e12)),
    ("H100", (989e12, 494e12, 67e12)),
    ("A100", (312e12, 156e12, 19.5e12)),
    ("A10", (125e12, 62.5e12, 31.2e12)),
    ("L40S", (362e12, 183e12, 91.6e12)),
    ("L40", (181e12, 90.5e12, 90.5e12)),
    ("L4", (121e12, 60e12, 30.3e12)),
    ("V100", (125e12, 15.7e12, 15.7e12)),
    ("T4", (65e12, 8.1e12, 8.1e12)),
    ("RTX 4090", (165e12, 82.6e12, 82.6e12)),
    ("RTX 3090", (71e12, 35.6e12, 35.6e12)),
)


class _Counters(NamedTuple):
    """The run's counters at one step."""

    time: float
    step: int
    micro_batches: int
    samples: int
    weight: float


@dataclass(eq=False, repr=False)
class ThroughputMonitor(Callback):
    """Logs rates over a sliding window of steps, every ``log_every_n_steps`` steps.

    Keys:
        - ``throughput/samples_per_sec``, ``throughput/steps_per_sec`` and ``throughput/micro_batches_per_sec`` (global
          batches), over all ranks.
        - ``throughput/tokens_per_sec``, over all ranks, if the module overrides `batch_weight` to count
          tokens.
        - ``throughput/tflops``: TFLOP/s of the module on one device.
        - ``throughput/mfu``: ``throughput/tflops`` as a fraction of the device's peak, if the peak is known.

    Time is measured on the host between logged steps, without validation, and without waiting for the device. The
    first step, a warm-up, is not counted. FLOPs are counted once, in the second micro-batch, by
    `torch.utils.flop_counter`, which does not see inside compiled kernels. Pass ``flops`` for compiled modules.

    Args:
        window: optimizer steps over which rates are averaged.
        peak_flops: peak FLOP/s of one device; None looks the peak up by the device's name. FLOPs are not counted if the
            peak is unknown.
        flops: FLOPs of the forward and backward pass of one micro-batch on one rank; None counts these FLOPs.

    Attributes:
        latest: the last logged values, by key.

    Raises:
        ConfigurationError: ``window`` is below 1.
    """

    _key_arguments = ("window", "peak_flops", "flops")
    _saved_attributes = ("latest",)  # for the launching process, after a run in other processes

    window: int = 100
    peak_flops: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        check_types(ThroughputMonitor, vars(self))
        check_count("ThroughputMonitor", "window", self.window, 1, "a number of optimizer steps")
        self.latest: dict[str, float] = {}
        self._history: deque[_Counters] = deque()
        self._weight: float | torch.Tensor = 0.0  # the sum of the micro-batches' weights on this rank
        self._counts_tokens = False
        self._calls_batch_weight = False
        self._paused_seconds = 0.0  # the time spent in validations
        self._paused_since = 0.0
        self._micro_batches_started = 0
        self._last_step = 0
        self._device_peak_flops: float | None = None
        self._flops_per_micro_batch: float | None = None
        self._flop_counter: FlopCounterMode | None = None

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Reset all counters."""
        self.latest = {}
        self._history.clear()
        self._weight = 0.0
        self._counts_tokens = is_overridden("batch_weight", module, TrainModule)
        # In manual optimization the engine does not compute weights.
        self._calls_batch_weight = self._counts_tokens and not module.automatic_optimization
        self._paused_seconds = 0.0
        self._micro_batches_started = 0
        self._last_step = trainer.global_step
        strategy = trainer.strategy
        self._device_peak_flops = self.peak_flops or known_peak_flops(strategy.device, trainer.precision.compute_dtype)
        self._flops_per_micro_batch = self.flops

    def on_train_batch_start(self, trainer: RunContext, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Add the micro-batch's weight, and start counting FLOPs in the second micro-batch."""
        self._micro_batches_started += 1
        if self._counts_tokens and not trainer.joining:
            # A weight that is a tensor is added on its device, so the host does not wait for the device.
            self._weight = self._weight + (
                module.batch_weight(batch) if self._calls_batch_weight else trainer.micro_batch_weight
            )
        if (
            self._micro_batches_started == 2
            and self._device_peak_flops is not None
            and self._flops_per_micro_batch is None
        ):
            from torch.utils.flop_counter import FlopCounterMode

            self._flop_counter = FlopCounterMode(display=False)
            self._flop_counter.__enter__()  # type: ignore[no-untyped-call]

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the counters after the first step and every ``log_every_n_steps`` steps."""
        if self._flop_counter is not None:
            self._stop_counting()
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        every = trainer.log_every_n_steps
        if every and (not self._history or step % every == 0):
            self._log_rates(trainer)

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Pause the clock during the validation."""
        self._paused_since = time.monotonic()

    def on_validation_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Resume the clock after the validation."""
        self._paused_seconds += time.monotonic() - self._paused_since

    def on_exception(self, trainer: RunContext, module: TrainModule, exception: BaseException) -> None:
        """Stop counting FLOPs."""
        if self._flop_counter is not None:
            self._flop_counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._flop_counter = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_flop_counter": None}

    def _log_rates(self, trainer: RunContext) -> None:
        weight = 0.0
        if self._counts_tokens:
            local = torch.tensor([float(self._weight)], dtype=torch.float64)
            weight = float(trainer.strategy.control.all_gather(local).sum())
        now = time.monotonic() - self._paused_seconds
        point = _Counters(now, trainer.global_step, self._micro_batches_started, trainer.samples_seen, weight)
        points = self._history
        points.append(point)
        # The newest point that is at least a whole window old is kept as the start of the window.
        while len(points) > 2 and points[1].step <= point.step - self.window:
            points.popleft()
        first = points[0]
        seconds = point.time - first.time
        if len(points) < 2 or seconds <= 0:
            return
        rates = {
            "samples_per_sec": (point.samples - first.samples) / seconds,
            "steps_per_sec": (point.step - first.step) / seconds,
            "micro_batches_per_sec": (point.micro_batches - first.micro_batches) / seconds,
        }
        if self._counts_tokens:
            rates["tokens_per_sec"] = (point.weight - first.weight) / seconds
        if self._flops_per_micro_batch is not None:
            achieved = self._flops_per_micro_batch * rates["micro_batches_per_sec"]
            rates["tflops"] = achieved / 1e12
            if self._device_peak_flops is not None:
                rates["mfu"] = achieved / self._device_peak_flops
        self.latest = {f"throughput/{name}": rate for name, rate in rates.items()}
        trainer.log_metrics(self.latest, step=trainer.global_step)

    def _stop_counting(self) -> None:
        assert self._flop_counter is not None
        self._flop_counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        total = self._flop_counter.get_total_flops()
        self._flop_counter = None
        if total:  # none are counted in compiled kernels
            self._flops_per_micro_batch = float(total)


def known_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of one device for matrix products in ``dtype``, or None if unknown.

    Args:
        device: the device on which the module computes.
        dtype: the dtype of matrix products; float32 means TF32 if torch is configured to use it.
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype, tf32_is_on())


def tf32_is_on() -> bool:
    """Return whether CUDA multiplies float32 matrices as TF32.

    torch has two interfaces for this setting. The older interface raises an error if the setting was made through the
    newer one.
    """
    newer = [getattr(backend, "fp32_precision", "none") for backend in (torch.backends.cuda.matmul, torch.backends)]
    precision = next((value for value in newer if value != "none"), None)
    return torch.get_float32_matmul_precision() != "highest" if precision is None else bool(precision == "tf32")


def peak_of(device_name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    """Return the peak FLOP/s of a device by the name that its driver reports, or None if unknown."""
    peaks = next((peaks for name, peaks in _PEAKS if _matches(device_name, name)), None)
    if peaks is None or dtype == torch.float64:
        return None
    return peaks[0] if dtype.itemsize == 2 else peaks[1] if tf32 else peaks[2]


def _matches(device_name: str, name: str) -> bool:
    # Whole words are compared, because "A100" must not match "A10".
    words, wanted = device_name.replace("-", " ").split(), name.split()
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words) - len(wanted) + 1))
