"""What comes back to the caller from a run in other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from drivetrain.module import TrainModule

if TYPE_CHECKING:
    from drivetrain.fit import Fit

Shapes = dict[str, tuple[int, ...]]

_CONTAINERS = ("_modules", "_parameters", "_buffers")


@dataclass(slots=True)
class Outcome:
    """One rank's end of a run.

    Attributes:
        result: what the stage returned.
        weights: the module's state.
        buffers: those that are no part of its state.
        layers: the module's own containers, where the run built or replaced layers; None where it only trained.
        progress: the counters.
        metrics: every value by every name.
        callbacks: their states, in their order.
        state: the trainer's.
    """

    result: Any
    weights: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    layers: dict[str, Any] | None
    progress: dict[str, int]
    metrics: dict[str, float]
    callbacks: list[dict[str, Any]]
    state: str

    @classmethod
    def of(cls, trainer: Fit, module: TrainModule, result: Any, shapes: Shapes) -> Self:
        """Collect what there is after a run, on rank 0 all of it; ``shapes`` are the module's of before."""
        session = trainer.session
        assert session is not None
        first = trainer.is_global_zero
        changed = first and shapes_of(module) != shapes
        return cls(
            result=result if first else None,
            weights={name: _on_cpu(value) for name, value in module.state_dict().items()} if first else {},
            buffers={name: _on_cpu(buffer) for name, buffer in module.named_buffers()} if first else {},
            layers={name: module.__dict__[name] for name in _CONTAINERS} if changed else None,
            progress=session.progress.state_dict(),
            metrics={name: float(value) for name, value in session.metrics.callback_metrics().items()},
            callbacks=[dict(callback.state_dict()) for callback in trainer.callbacks],
            state=trainer.state,
        )

    def fill(self, module: TrainModule) -> None:
        """Make the caller's module what rank 0's is. Its tensors stay the same objects where no layer changed."""
        if self.layers is not None:
            module.__dict__.update(self.layers)
        module.load_state_dict(self.weights)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(self.buffers[name])


def shapes_of(module: TrainModule) -> Shapes:
    """Return the shape of every parameter and buffer by name."""
    return {name: tuple(tensor.shape) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
