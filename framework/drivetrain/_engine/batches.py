"""How a batch gets to the device: hooks, copies, dtypes; and on CUDA while the one before it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.windows import MicroBatch
from drivetrain.data import DataModule
from drivetrain.data._keeping import own_pinned_memory
from drivetrain.data._prefetch import Prefetcher
from drivetrain.module._module_hooks import ModuleHooks
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import Strategy

Move = Callable[[Any, int], Any]


def batch_mover(module: TrainModule, datamodule: DataModule | None, strategy: Strategy) -> Move | None:
    """Return what is done to a batch before a step, ``move(batch, dataloader_idx)``; None where it is nothing."""
    before = _hooks("on_before_batch_transfer", module, datamodule)
    after = _hooks("on_after_batch_transfer", module, datamodule)
    transfer = _transfer(module, datamodule, strategy)
    precision = strategy.precision
    if not (before or after or transfer or precision.converts_batch):
        return None

    def move(batch: Any, dataloader_idx: int) -> Any:
        for hook in before:
            batch = hook(batch, dataloader_idx)
        if transfer is not None:
            batch = transfer(batch, dataloader_idx)
        if precision.converts_batch:
            batch = precision.convert_batch(batch)
        for hook in after:
            batch = hook(batch, dataloader_idx)
        return batch

    return move


def moved(
    micro_batches: Iterator[MicroBatch],
    move: Move | None,
    device: torch.device,
    ahead: bool = True,
    lasting: bool = True,
) -> Iterator[MicroBatch]:
    """Bring micro-batches to the device, on CUDA one ahead (where that may be) and on a stream of its own.

    Args:
        micro_batches: an epoch's.
        move: what is done to a batch; None where it is nothing.
        device: where to.
        ahead: the next one may be read before the current one is trained on.
        lasting: a batch stays as it is while the next one is read.
    """
    if move is None:
        return micro_batches
    if device.type == "cuda" and ahead:
        return _moved_ahead(micro_batches, move, device, lasting)
    return _moved_here(micro_batches, move)


def _moved_here(micro_batches: Iterator[MicroBatch], move: Move) -> Iterator[MicroBatch]:
    for micro in micro_batches:
        micro.batch = move(micro.batch, 0)
        yield micro


def _moved_ahead(
    micro_batches: Iterator[MicroBatch], move: Move, device: torch.device, lasting: bool
) -> Iterator[MicroBatch]:
    prefetcher = Prefetcher(device, lambda batch: move(batch, 0))
    waiting: MicroBatch | None = None
    for micro in micro_batches:
        batch = micro.batch if lasting else own_pinned_memory(micro.batch)
        sent = micro.with_batch(prefetcher.send(batch))
        if waiting is not None:
            waiting.batch = prefetcher.receive(waiting.batch)
            yield waiting
        waiting = sent
    if waiting is not None:
        waiting.batch = prefetcher.receive(waiting.batch)
        yield waiting


def _hooks(name: str, module: TrainModule, datamodule: DataModule | None) -> tuple[Move, ...]:
    hooks: list[Move] = []
    if datamodule is not None and is_overridden(name, datamodule, DataModule):
        hooks.append(getattr(datamodule, name))
    if is_overridden(name, module, ModuleHooks):
        hooks.append(getattr(module, name))
    return tuple(hooks)


def _transfer(module: TrainModule, datamodule: DataModule | None, strategy: Strategy) -> Move | None:
    name = "transfer_batch_to_device"
    for owner, base in ((module, TrainModule), (datamodule, DataModule)):
        if owner is not None and is_overridden(name, owner, base):
            hook = getattr(owner, name)
            return lambda batch, dataloader_idx: hook(batch, strategy.device, dataloader_idx)
    # A CPU batch is where a CPU module needs it.
    if strategy.device.type == "cpu" and not is_overridden("to_device", strategy, Strategy):
        return None
    return lambda batch, dataloader_idx: strategy.to_device(batch)
