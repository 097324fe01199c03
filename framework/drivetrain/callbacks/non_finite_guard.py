"""NonFiniteGuard: stop at the first NaN or infinity, and say where it was."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, NonFiniteError
from drivetrain.module.train_module import TrainModule
from drivetrain.precision._gradient_meshes import group_by_mesh

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

_CAPACITY = 256  # micro-batches between two looks at most, whatever the window
_LOSS, _GRADIENT, _PARAMETER = 0, 1, 2


class _Mark(NamedTuple):
    """Which micro-batch it was."""

    epoch: int
    step: int
    batch_idx: int
    weight: float
    """Over how many items its loss is a mean; the mean over none is NaN and counts for nothing."""


class NonFiniteGuard(Callback):
    """Stops the run with `NonFiniteError` when a loss is NaN or infinite, naming the step, the rank and the batch.

    Every loss is written to a small buffer on its device; the host reads it every ``every_n_steps`` steps, before a
    validation and at an epoch's end, and only then waits for the device and talks to the other ranks. The error comes
    up to so many steps late, on every rank at once, but it names the first bad micro-batch exactly. With
    ``every_n_steps=1`` it comes right after the step. Looked at are the losses that are back-propagated, as
    `training_step` returned them (in manual optimization each one given to `manual_backward`).

    Args:
        every_n_steps: optimizer steps between two looks.
        check_gradients: also watch the gradients of every step, before clipping. Refused with a loss scaler
            (16-mixed), which expects overflows and skips those steps. Nothing is seen where the strategy keeps no
            ``.grad``.
        check_parameters: also look through the parameters themselves, every ``every_n_steps`` steps.

    Raises:
        ConfigurationError: ``every_n_steps`` is below 1; at the run's start, ``check_gradients`` with a loss scaler.
        NonFiniteError: on every rank, when something was not finite on any.
    """

    priority = 100  # before anything is saved or decided from what is not a number

    def __init__(self, every_n_steps: int = 50, check_gradients: bool = False, check_parameters: bool = False) -> None:
        if every_n_steps < 1:
            raise ConfigurationError(
                f"NonFiniteGuard(every_n_steps={every_n_steps!r})",
                "it is a number of optimizer steps between two looks",
                "give 1 or more",
            )
        self.every_n_steps = every_n_steps
        self.check_gradients = check_gradients
        self.check_parameters = check_parameters
        self._window: Tensor | None = None
        self._marks: list[_Mark] = []
        self._step = 0  # steps made as the current micro-batch began
        self._looked_at = 0

    @property
    def state_key(self) -> str:
        """The class and its settings."""
        settings = {
            "every_n_steps": self.every_n_steps,
            "check_gradients": self.check_gradients,
            "check_parameters": self.check_parameters,
        }
        return f"{type(self).__qualname__}{settings!r}"

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin with nothing seen."""
        if self.check_gradients and trainer.precision.scales_loss:
            raise ConfigurationError(
                f"NonFiniteGuard(check_gradients=True) with precision {trainer.precision.name!r}",
                "its loss scaler tries large scales: overflowing gradients are normal there, and their step is skipped",
                "leave check_gradients off, or use bf16-mixed, which needs no scaler",
            )
        self._window = None
        self._marks = []
        self._step = self._looked_at = trainer.global_step

    def on_before_backward(self, trainer: RunContext, module: TrainModule, loss: Tensor) -> None:
        """Keep the loss on its device."""
        # Several losses of one micro-batch share a place: NaN and infinity survive a sum.
        self._place(loss, _LOSS).add_(loss.detach())

    def on_before_optimizer_step(self, trainer: RunContext, module: TrainModule, optimizer: Optimizer) -> None:
        """Keep the largest magnitude among this rank's gradients."""
        if not self.check_gradients:
            return
        plain, sharded = group_by_mesh([optimizer])
        gradients = [_dense(p.grad) for p in (*plain, *(p for held in sharded.values() for p in held))]
        if gradients:
            largest = get_total_norm(gradients, math.inf)
            self._place(largest, _GRADIENT).add_(largest)

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Note which micro-batch that was, and look when it is time."""
        self._marks.append(_Mark(trainer.current_epoch, self._step, batch_idx, trainer.micro_batch_weight))
        self._step = step = trainer.global_step
        if step - self._looked_at >= self.every_n_steps or len(self._marks) == _CAPACITY:
            self._look(trainer, module)

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Do not validate, and then keep, a model that is not one any more."""
        if self._marks:
            self._look(trainer, module)

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Look at what is left of the epoch."""
        if self._marks:
            self._look(trainer, module)

    def on_train_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Look at what is left of a training that ended within an epoch."""
        if self._marks:
            self._look(trainer, module)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_window": None, "_marks": []}

    def _place(self, value: Tensor, column: int) -> Tensor:
        """The current micro-batch's element for losses or gradients, a view of shape ()."""
        if self._window is None:
            # Half precision's largest number would make an ordinary sum of losses infinite.
            dtype = torch.float32 if value.device.type == "mps" else torch.float64
            self._window = torch.zeros(_CAPACITY, 2, dtype=dtype, device=value.device)
        return self._window[len(self._marks), column]

    def _look(self, trainer: RunContext, module: TrainModule) -> None:
        marks, self._marks = self._marks, []
        self._looked_at = trainer.global_step
        everyone = trainer.strategy.control.all_gather(self._finding(marks, module))
        bad = [(int(row[0]), int(row[1]), rank) for rank, row in enumerate(everyone) if row[0] >= 0]
        if bad:
            _refuse(bad, everyone, marks, [name for name, _ in module.named_parameters()])

    def _finding(self, marks: list[_Mark], module: torch.nn.Module) -> Tensor:
        """This rank's first bad thing: micro-batch, kind, value, index of the parameter; micro-batch -1 for none."""
        if self._window is not None:
            values = self._window[: len(marks)].tolist()
            self._window.zero_()
            for index, row in enumerate(values):
                for kind in (_LOSS, _GRADIENT):
                    if not math.isfinite(row[kind]) and (kind == _GRADIENT or marks[index].weight > 0):
                        return torch.tensor([index, kind, row[kind], -1.0], dtype=torch.float64)
        if self.check_parameters:
            first = _first_bad_parameter(module)
            if first is not None:
                return torch.tensor([len(marks) - 1, _PARAMETER, math.nan, first], dtype=torch.float64)
        return torch.tensor([-1.0, 0.0, 0.0, -1.0], dtype=torch.float64)


def _refuse(bad: list[tuple[int, int, int]], everyone: Tensor, marks: list[_Mark], names: list[str]) -> None:
    index, kind, first_rank = min(bad)
    ranks = [rank for place, what, rank in bad if (place, what) == (index, kind)]
    mark = marks[index]
    value = float(everyone[first_rank, 2])
    thing = {
        _LOSS: f"The loss is {value}",
        _GRADIENT: f"A gradient is {value}",
        _PARAMETER: f"The parameter {names[int(everyone[first_rank, 3])]!r} is not finite",
    }[kind]
    where = f"rank {first_rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    raise NonFiniteError(
        f"{thing} on {where} at batch index {mark.batch_idx} of epoch {mark.epoch}, after {mark.step} optimizer steps "
        f"(global_step={mark.step})",
        "what follows from it is not a number either; the weights may already hold it",
        "look at that batch, lower the learning rate, clip gradients (gradient_clip_val) or use a wider precision; "
        "Fit(detect_anomaly=True) names the operation",
    )


def _first_bad_parameter(module: torch.nn.Module) -> int | None:
    """The index of the first parameter that is not finite, in one transfer; None where all are."""
    flags = []
    for parameter in module.parameters():
        local: Any = parameter.detach()
        local = local.to_local() if hasattr(local, "device_mesh") else local
        flags.append(torch.isfinite(local).all() if local.is_floating_point() else torch.ones((), dtype=torch.bool))
    if not flags:
        return None
    device = flags[0].device
    bad = (~torch.stack([flag.to(device) for flag in flags])).nonzero()
    return int(bad[0]) if len(bad) else None


def _dense(gradient: Any) -> Tensor:
    """This rank's plain values of a gradient."""
    if hasattr(gradient, "device_mesh"):
        gradient = gradient.to_local()
    values: Tensor = gradient.coalesce().values() if gradient.is_sparse else gradient
    return values
