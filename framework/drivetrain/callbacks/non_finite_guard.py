"""NonFiniteGuard: stops the run at the first NaN or infinity and reports where it occurred."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from drivetrain._config.argument_checks import check_count
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, NonFiniteError
from drivetrain.module.train_module import TrainModule

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

_CAPACITY = 256  # rows of the buffer, and thus the maximum number of micro-batches between two checks
_LOSS, _GRADIENT, _PARAMETER = 0, 1, 2


class _MicroBatch(NamedTuple):
    """The position of a micro-batch in the run."""

    epoch: int
    step: int
    batch_idx: int
    weight: float
    """Number of items over which the micro-batch's loss is a mean. If it is 0, the loss may be NaN and is ignored."""


@dataclass(eq=False, repr=False)
class NonFiniteGuard(Callback):
    """Raises `NonFiniteError` when a loss is NaN or infinite, naming the step, the rank and the batch.

    Losses are collected in a small buffer on the device. The host reads the buffer, which waits for the device and
    communicates with the other ranks, only every ``every_n_steps`` steps, before a validation and at the end of an
    epoch. The error is therefore raised up to ``every_n_steps`` steps late, on every rank at once, but names exactly
    the first micro-batch with a non-finite value. With ``every_n_steps=1`` the error is raised right after the step.
    The guard checks the losses that `training_step` returned or, in manual optimization, the losses passed to
    `manual_backward`.

    Args:
        every_n_steps: optimizer steps between two checks.
        check_gradients: whether to check the gradients of every step, before clipping. Not allowed with a loss scaler
            (16-mixed), which expects overflows and skips the steps with overflows. Has no effect if the strategy does
            not store gradients in ``.grad``.
        check_parameters: whether to also check the parameters, every ``every_n_steps`` steps.

    Raises:
        ConfigurationError: ``every_n_steps`` is below 1; at the start of the run, if ``check_gradients`` is used with a
            loss scaler.
        NonFiniteError: on every rank, if a value on any rank is not finite.
    """

    priority = 100  # before callbacks that save or decide

    _key_arguments = ("every_n_steps", "check_gradients", "check_parameters")

    every_n_steps: int = 50
    check_gradients: bool = False
    check_parameters: bool = False

    def __post_init__(self) -> None:
        meaning = "the number of optimizer steps between two checks"
        check_count("NonFiniteGuard", "every_n_steps", self.every_n_steps, 1, meaning)
        self._buffer: Tensor | None = None
        self._micro_batches: list[_MicroBatch] = []
        self._step = 0  # global_step at the start of the current micro-batch
        self._last_check = 0

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Check that ``check_gradients`` is possible in this run, and reset the buffer."""
        if self.check_gradients and trainer.precision.scales_loss:
            raise ConfigurationError(
                f"NonFiniteGuard(check_gradients=True) with precision {trainer.precision.name!r}",
                "a loss scaler tries large scales, so some gradients overflow and the scaler skips these steps",
                "leave check_gradients off, or use bf16-mixed, which needs no loss scaler",
            )
        self._buffer = None
        self._micro_batches = []
        self._step = self._last_check = trainer.global_step

    def on_before_backward(self, trainer: RunContext, module: TrainModule, loss: Tensor) -> None:
        """Add the loss to the buffer on its device."""
        # Several losses of one micro-batch are summed, which preserves NaN and infinity.
        self._buffer_entry(loss, _LOSS).add_(loss.detach())

    def on_before_optimizer_step(self, trainer: RunContext, module: TrainModule, optimizer: Optimizer) -> None:
        """Add the largest magnitude among this rank's gradients to the buffer."""
        if not self.check_gradients:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [_dense(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            largest = get_total_norm(gradients, math.inf)
            self._buffer_entry(largest, _GRADIENT).add_(largest)

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the micro-batch, and check the buffer if ``every_n_steps`` is reached or the buffer is full."""
        self._micro_batches.append(
            _MicroBatch(trainer.current_epoch, self._step, batch_idx, trainer.micro_batch_weight)
        )
        self._step = step = trainer.global_step
        if step - self._last_check >= self.every_n_steps or len(self._micro_batches) == _CAPACITY:
            self._check(trainer, module)

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Check the buffer before weights that are not finite are validated and possibly saved."""
        if self._micro_batches:
            self._check(trainer, module)

    on_train_epoch_end = on_train_end = on_validation_start  # training may end within an epoch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_buffer": None, "_micro_batches": []}

    def _buffer_entry(self, value: Tensor, column: int) -> Tensor:
        """Return the buffer's element for the current micro-batch's loss or gradients, a view of shape ()."""
        if self._buffer is None:
            # A sum of losses in half precision could overflow.
            dtype = torch.float32 if value.device.type == "mps" else torch.float64
            self._buffer = torch.zeros(_CAPACITY, 2, dtype=dtype, device=value.device)
        return self._buffer[len(self._micro_batches), column]

    def _check(self, trainer: RunContext, module: TrainModule) -> None:
        micro_batches, self._micro_batches = self._micro_batches, []
        self._last_check = trainer.global_step
        problem_by_rank = trainer.strategy.control.all_gather(self._first_problem(micro_batches, module))
        problems = [(int(row[0]), int(row[1]), rank) for rank, row in enumerate(problem_by_rank) if row[0] >= 0]
        if problems:
            _raise_error(problems, problem_by_rank, micro_batches, [name for name, _ in module.named_parameters()])

    def _first_problem(self, micro_batches: list[_MicroBatch], module: torch.nn.Module) -> Tensor:
        """Return this rank's first non-finite value: micro-batch (-1 for none), kind, value and parameter index."""
        if self._buffer is not None:
            values = self._buffer[: len(micro_batches)].tolist()
            self._buffer.zero_()
            for index, row in enumerate(values):
                for kind in (_LOSS, _GRADIENT):
                    if not math.isfinite(row[kind]) and (kind == _GRADIENT or micro_batches[index].weight > 0):
                        return torch.tensor([index, kind, row[kind], -1.0], dtype=torch.float64)
        if self.check_parameters:
            first = _first_bad_parameter(module)
            if first is not None:
                return torch.tensor([len(micro_batches) - 1, _PARAMETER, math.nan, first], dtype=torch.float64)
        return torch.tensor([-1.0, 0.0, 0.0, -1.0], dtype=torch.float64)


def _raise_error(
    problems: list[tuple[int, int, int]], problem_by_rank: Tensor, micro_batches: list[_MicroBatch], names: list[str]
) -> None:
    index, kind, first_rank = min(problems)
    ranks = [rank for *position, rank in problems if position == [index, kind]]
    micro_batch = micro_batches[index]
    value = float(problem_by_rank[first_rank, 2])
    problem = {
        _LOSS: f"The loss is {value}",
        _GRADIENT: f"A gradient is {value}",
        _PARAMETER: f"The parameter {names[int(problem_by_rank[first_rank, 3])]!r} is not finite",
    }[kind]
    rank_text = f"rank {first_rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    raise NonFiniteError(
        f"{problem} on {rank_text} at batch index {micro_batch.batch_idx} of epoch {micro_batch.epoch}, after "
        f"{micro_batch.step} optimizer steps (global_step={micro_batch.step})",
        "training does not recover from non-finite values; the weights may already contain NaN",
        "inspect that batch, lower the learning rate, clip gradients (gradient_clip_val) or use a wider precision; "
        "Fit(detect_anomaly=True) names the operation that produced the value",
    )


def _first_bad_parameter(module: torch.nn.Module) -> int | None:
    """Return the index of the first non-finite parameter, or None. The search makes one transfer to the host."""
    flags = []
    for parameter in module.parameters():
        local: Any = parameter.detach()
        local = local.to_local() if hasattr(local, "device_mesh") else local
        flags.append(torch.isfinite(local).all() if local.is_floating_point() else torch.ones((), dtype=torch.bool))
    if not flags:
        return None
    device = flags[0].device
    problems = (~torch.stack([flag.to(device) for flag in flags])).nonzero()
    return int(problems[0]) if len(problems) else None


def _dense(gradient: Any) -> Tensor:
    """Return the local values of a gradient as a dense tensor."""
    if hasattr(gradient, "device_mesh"):
        gradient = gradient.to_local()
    values: Tensor = gradient.coalesce().values() if gradient.is_sparse else gradient
    return values
