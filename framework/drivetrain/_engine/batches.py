"""How a batch gets to the device: hooks, copies, dtypes; and on CUDA while the one before it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.windows import MicroBatch
from drivetrain.data import DataModule
from drivetrain.data._batch_copies import copy_pinned_tensors
from drivetrain.data._prefetcher import Prefetcher
from drivetrain.module._module_hooks import ModuleHooks
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import Strategy

Move = Callable[[Any, int], Any]


class BatchMover:
    """What is done to a batch before a step: hooks, the copy to the device, the precision's casts, hooks.

    Args:
        before: hooks, with the batch as the loader gave it.
        transfer: brings it to the device.
        finish: casts and hooks, with the batch on the device.
        device: to which ``transfer`` only copies, so that it may be done ahead; None where it is the user's own.
    """

    def __init__(
        self, before: Sequence[Move], transfer: Move | None, finish: Sequence[Move], device: torch.device | None
    ) -> None:
        self._before = before
        self._transfer = transfer
        self._finish = finish
        self._device = device
        self._prefetcher: Prefetcher | None = None

    def __call__(self, batch: Any, dataloader_idx: int) -> Any:
        batch = self.prepared(batch, dataloader_idx)
        if self._transfer is not None:
            batch = self._transfer(batch, dataloader_idx)
        return self.finished(batch, dataloader_idx)

    def prepared(self, batch: Any, dataloader_idx: int) -> Any:
        """Call the hooks that come before the copy."""
        for hook in self._before:
            batch = hook(batch, dataloader_idx)
        return batch

    def finished(self, batch: Any, dataloader_idx: int) -> Any:
        """Do what comes after the copy, on the stream that the step computes on: the user's code knows no other."""
        for change in self._finish:
            batch = change(batch, dataloader_idx)
        return batch

    def wrap(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put something around each thing that is done to a batch, before the first is moved."""
        self._before = [around(hook) for hook in self._before]
        self._transfer = None if self._transfer is None else around(self._transfer)
        self._finish = [around(change) for change in self._finish]
        if self.prefetcher is not None:
            self.prefetcher.wrap(around)

    @property
    def prefetcher(self) -> Prefetcher | None:
        """What copies ahead, one for the whole run: each has a stream, whose memory no other stream can use."""
        if self._prefetcher is None and self._device is not None and self._device.type == "cuda":
            self._prefetcher = Prefetcher(self._device)
        return self._prefetcher


def batch_mover(module: TrainModule, datamodule: DataModule | None, strategy: Strategy) -> BatchMover | None:
    """Return what is done to a batch before a step; None where it is nothing."""
    before = _hooks("on_before_batch_transfer", module, datamodule)
    after = _hooks("on_after_batch_transfer", module, datamodule)
    own = _own_transfer(module, datamodule, strategy)
    precision = strategy.precision
    plain = own is None and not is_overridden("to_device", strategy, Strategy)
    if plain and strategy.device.type == "cpu":  # a CPU batch is where a CPU module needs it
        transfer = None
    else:
        transfer = own or (lambda batch, dataloader_idx: strategy.to_device(batch))
    converts = (lambda batch, dataloader_idx: precision.convert_batch(batch),) if precision.converts_batch else ()
    if not (before or after or transfer or converts):
        return None
    return BatchMover(before, transfer, (*converts, *after), strategy.device if plain else None)


def moved(
    micro_batches: Iterator[MicroBatch],
    move: BatchMover | None,
    ahead: bool = True,
    fresh_memory: bool = True,
) -> Iterator[MicroBatch]:
    """Bring micro-batches to the device, on CUDA one ahead (where that may be) and on a stream of its own.

    Args:
        micro_batches: an epoch's.
        move: what is done to a batch; None where it is nothing.
        ahead: the next one may be read before the current one is trained on.
        fresh_memory: a batch stays as it is while the next one is read.
    """
    if move is None:
        return micro_batches
    prefetcher = move.prefetcher
    if prefetcher is not None and ahead:
        return _moved_ahead(micro_batches, move, prefetcher, fresh_memory)
    return _moved_here(micro_batches, move if prefetcher is None else safely(move, fresh_memory))


def safely(move: Move, fresh_memory: bool) -> Move:
    """Return what moves batches of a loader that may write the next one over this one while that is being copied."""
    return move if fresh_memory else lambda batch, dataloader_idx: move(copy_pinned_tensors(batch), dataloader_idx)


def _moved_here(micro_batches: Iterator[MicroBatch], move: Move) -> Iterator[MicroBatch]:
    for micro in micro_batches:
        micro.batch = move(micro.batch, 0)
        yield micro


def _moved_ahead(
    micro_batches: Iterator[MicroBatch], move: BatchMover, prefetcher: Prefetcher, fresh_memory: bool
) -> Iterator[MicroBatch]:
    waiting: MicroBatch | None = None
    for micro in micro_batches:
        batch = micro.batch if fresh_memory else copy_pinned_tensors(micro.batch)
        sent = micro.with_batch(prefetcher.send(move.prepared(batch, 0)))
        if waiting is not None:
            waiting.batch = move.finished(prefetcher.receive(waiting.batch), 0)
            yield waiting
        waiting = sent
    if waiting is not None:
        waiting.batch = move.finished(prefetcher.receive(waiting.batch), 0)
        yield waiting


def _hooks(name: str, module: TrainModule, datamodule: DataModule | None) -> tuple[Move, ...]:
    hooks: list[Move] = []
    if datamodule is not None and is_overridden(name, datamodule, DataModule):
        hooks.append(getattr(datamodule, name))
    if is_overridden(name, module, ModuleHooks):
        hooks.append(getattr(module, name))
    return tuple(hooks)


def _own_transfer(module: TrainModule, datamodule: DataModule | None, strategy: Strategy) -> Move | None:
    """Return the user's own way to the device; None where there is none."""
    name = "transfer_batch_to_device"
    for owner, base in ((module, TrainModule), (datamodule, DataModule)):
        if owner is not None and is_overridden(name, owner, base):
            hook = getattr(owner, name)
            return lambda batch, dataloader_idx: hook(batch, strategy.device, dataloader_idx)
    return None
