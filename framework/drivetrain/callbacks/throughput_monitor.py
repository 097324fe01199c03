"""ThroughputMonitor: how much a run gets done in a second, and how much of the hardware that takes."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drivetrain._loops.hooks import is_overridden
from drivetrain.callback import Callback
from drivetrain.callbacks._peak_flops import known_peak_flops
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from drivetrain.run_context import RunContext


class _Point(NamedTuple):
    """The counters at one moment."""

    time: float
    step: int
    micro_batches: int
    samples: int
    weight: float


class ThroughputMonitor(Callback):
    """Logs rates over a sliding window of steps, with every ``log_every_n_steps``-th step.

    Keys, all of the whole run, over all ranks: ``throughput/samples_per_sec``, ``throughput/steps_per_sec``,
    ``throughput/micro_batches_per_sec`` (global ones), ``throughput/tokens_per_sec`` where the module overrides
    `batch_weight` (the items it counts), and of one device ``throughput/tflops`` and ``throughput/mfu``, the share of
    the device's peak that the module's own arithmetic uses, where the peak is known.

    Time is the host's between two logged steps, without validation; nothing waits for the device in between. The
    first step, which warms up, is left out. The arithmetic is counted once, in the second micro-batch, by
    `torch.utils.flop_counter`; what runs inside compiled kernels is invisible to it: give ``flops`` there.

    Args:
        window: optimizer steps over which rates are averaged.
        peak_flops: peak FLOP/s of one device; ``None`` looks the device's name up, and without it there is no MFU.
        flops: FLOPs of one micro-batch on one rank, forward and backward; ``None`` counts them.

    Attributes:
        latest: what was logged last, by key.

    Raises:
        ConfigurationError: an argument is not above 0.
    """

    def __init__(self, window: int = 100, peak_flops: float | None = None, flops: float | None = None) -> None:
        for name, value in (("window", window), ("peak_flops", peak_flops), ("flops", flops)):
            if value is not None and value <= 0:
                raise ConfigurationError(
                    f"ThroughputMonitor({name}={value!r})", "rates are per something", "give a number above 0"
                )
        self.window = window
        self.peak_flops = peak_flops
        self.flops = flops
        self.latest: dict[str, float] = {}
        self._points: deque[_Point] = deque()
        self._weight: float | torch.Tensor = 0.0
        self._weighs = False
        self._asks = False
        self._paused = 0.0
        self._paused_since = 0.0
        self._begun = 0  # micro-batches begun in this run
        self._last_step = 0
        self._peak: float | None = None
        self._counted: float | None = None
        self._counter: FlopCounterMode | None = None

    @property
    def state_key(self) -> str:
        """The class and its settings."""
        settings = {"window": self.window, "peak_flops": self.peak_flops, "flops": self.flops}
        return f"{type(self).__qualname__}{settings!r}"

    def state_dict(self) -> dict[str, Any]:
        """The latest rates, for whoever started the run in other processes."""
        return {"latest": dict(self.latest)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the rates back; the next window replaces them."""
        self.latest = dict(state_dict["latest"])

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin anew."""
        self.latest = {}
        self._points.clear()
        self._weight = 0.0
        self._weighs = is_overridden("batch_weight", module, TrainModule)
        self._asks = self._weighs and not module.automatic_optimization  # where no window has weighed it
        self._paused = 0.0
        self._begun = 0
        self._last_step = trainer.global_step
        strategy = trainer.strategy
        self._peak = self.peak_flops or known_peak_flops(strategy.device, trainer.precision.compute_dtype)
        self._counted = self.flops

    def on_train_batch_start(self, trainer: RunContext, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Weigh the micro-batch, and count the second one's arithmetic."""
        self._begun += 1
        if self._weighs and not trainer.joining:
            # A tensor that is still on its way is added where it is.
            self._weight = self._weight + (module.batch_weight(batch) if self._asks else trainer.micro_batch_weight)
        if self._begun == 2 and self._peak is not None and self._counted is None:
            from torch.utils.flop_counter import FlopCounterMode

            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Take the counters with the first step and with every logged one."""
        if self._counter is not None:
            self._stop_counting()
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        every = trainer.log_every_n_steps
        if every and (not self._points or step % every == 0):
            self._take(trainer)

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Stop the clock."""
        self._paused_since = time.monotonic()

    def on_validation_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Go on."""
        self._paused += time.monotonic() - self._paused_since

    def on_exception(self, trainer: RunContext, module: TrainModule, exception: BaseException) -> None:
        """Leave nothing switched on."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counter = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_counter": None}

    def _take(self, trainer: RunContext) -> None:
        weight = 0.0
        if self._weighs:
            mine = torch.tensor([float(self._weight)], dtype=torch.float64)
            weight = float(trainer.strategy.control.all_gather(mine).sum())
        now = time.monotonic() - self._paused
        point = _Point(now, trainer.global_step, self._begun, trainer.samples_seen, weight)
        points = self._points
        points.append(point)
        # The oldest is the last that is still a whole window away.
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
        if self._weighs:
            rates["tokens_per_sec"] = (point.weight - first.weight) / seconds
        if self._counted is not None:
            achieved = self._counted * rates["micro_batches_per_sec"]
            rates["tflops"] = achieved / 1e12
            if self._peak is not None:
                rates["mfu"] = achieved / self._peak
        self.latest = {f"throughput/{name}": rate for name, rate in rates.items()}
        trainer.log_metrics(self.latest, step=trainer.global_step)

    def _stop_counting(self) -> None:
        assert self._counter is not None
        self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        total = self._counter.get_total_flops()
        self._counter = None
        if total > 0:
            self._counted = float(total)
        else:
            warnings.warn(
                "ThroughputMonitor counted no arithmetic, so there is no MFU: the module runs in compiled kernels, or "
                "in operations that torch.utils.flop_counter does not know. Give ThroughputMonitor(flops=...).",
                stacklevel=2,
            )
