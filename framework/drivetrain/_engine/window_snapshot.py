"""What a run had as its window opened: a run that leaves within the window is saved as it was then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain._engine.evaluation_buffers import is_held_here
from drivetrain._loops.progress import Progress
from drivetrain._metrics import MetricStore
from drivetrain.data._batch_source import BatchSource
from drivetrain.data._rng_replay import ReadAhead


@dataclass(slots=True)
class _Taken:
    batch_idx: int
    draws: Callable[[], dict[str, Any]]
    metrics: Callable[[], dict[str, Any]]
    source: Any


class WindowOpening:
    """Keeps what the micro-batches of a window change before its step is made.

    Weights and optimizers are as they were until then. Buffers, generators, logged values and the place in the data are
    not: they are copied once a window, where one has several micro-batches. That takes some 0.1 ms on the host, a
    launch on the device, and as much memory as the buffers.

    Args:
        module: the user's.
        source: where the training batches come from.
        draws: how far generators have come.
        metrics: where steps log.
        progress: the counters.
        size: says how many micro-batches a window of this epoch has.
    """

    def __init__(
        self,
        module: nn.Module,
        source: BatchSource,
        draws: ReadAhead,
        metrics: MetricStore,
        progress: Progress,
        size: Callable[[], int],
    ) -> None:
        self._module = module
        self._source = source
        self._draws = draws
        self._metrics = metrics
        self._progress = progress
        self._size = size
        self._taken: _Taken | None = None
        self._places: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._objects: list[str] = []
        self._buffers: dict[str, Tensor] = {}
        self._in_force = False

    def read_from(self, source: BatchSource) -> None:
        """Take note of another source from here on, between two epochs."""
        self._source = source

    def begin_epoch(self) -> bool:
        """Take note of what there is, unless windows have one micro-batch: nothing comes between them then.

        Buffers and metric objects are found anew: hooks that begin an epoch may have changed the module.
        """
        self._taken = None
        if self._size() == 1:
            return False
        layers = dict(self._module.named_modules(remove_duplicate=False)).items()
        self._places = [
            (f"{path}.{name}" if path else name, layer._buffers, name)
            for path, layer in layers
            for name in _kept(layer)
        ]
        self._objects = list(self._metrics.objects.all())
        self.take()
        return True

    def take(self) -> None:
        """Copy what there is, before anything of the next window is read."""
        state = self._source.state_dict()
        self._taken = _Taken(
            self._progress.batch_idx,
            self._draws.capture(self._progress.batch_idx),
            self._metrics.capture(self._objects),
            deepcopy(state) if self._source.stateful else state,
        )
        if self._places:
            self._copy_buffers()

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        now = self._held()
        if now.keys() == self._buffers.keys() and all(_fits(self._buffers[key], one) for key, one in now.items()):
            if now:
                torch._foreach_copy_([self._buffers[key] for key in now], list(now.values()))
        else:
            self._buffers = {key: one.detach().clone() for key, one in now.items()}

    @contextmanager
    @torch.no_grad()
    def evaluating(self) -> Iterator[None]:
        """Keep what an evaluation within the window does to buffers: it is over, and not done once more."""
        before = {key: one.detach().clone() for key, one in self._held().items()}
        yield
        for key, one in self._held().items():
            if key not in before or not torch.equal(before[key], one):
                self._buffers[key] = one.detach().clone()

    def go_back(self) -> None:
        """Count as before the window, and let what is saved from here on be as it was then, where it was noted."""
        self._progress.back_to_the_window()
        # Between a window's step and the next one's opening nothing is as it was noted.
        self._in_force = self._taken is not None and self._taken.batch_idx == self._progress.batch_idx

    @property
    def in_force(self) -> bool:
        """Whether the run has gone back to it: what is saved from then on is as it was at the opening."""
        return self._in_force

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The values of the persistent buffers, by name; none while it is not in force."""
        return self._buffers if self.in_force else {}

    @property
    def has_begun_the_epoch(self) -> bool:
        """Whether it is in force, and the window is the epoch's first: the hooks that begin it were called."""
        return self.in_force and self._progress.batch_idx == 0

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank says of itself in a checkpoint, but for its buffers."""
        assert self._taken is not None
        return {"draws": self._taken.draws(), "metrics": self._taken.metrics(), "source": self._taken.source}

    def _held(self) -> dict[str, Tensor]:
        found = {key: buffers.get(name) for key, buffers, name in self._places}
        return {key: buffer for key, buffer in found.items() if is_held_here(buffer)}


def _kept(layer: nn.Module) -> list[str]:
    return [name for name in layer._buffers if name not in layer._non_persistent_buffers_set]


def _fits(copy: Tensor, buffer: Tensor) -> bool:
    return copy.shape == buffer.shape and copy.dtype == buffer.dtype and copy.device == buffer.device
