"""Moves batches to the device: calls transfer hooks, copies and casts. On CUDA, copies are one batch ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain._data.batch_copies import copy_pinned_tensors
from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.windows import MicroBatch
from drivetrain._module.module_hooks import ModuleHooks
from drivetrain._runtime.transfer import map_tensors, move_to
from drivetrain.data import DataModule
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.strategies.strategy import Strategy

Move = Callable[[Any, int], Any]


@dataclass(eq=False)
class BatchMover:
    """Prepares a batch for a step: calls hooks, copies the batch to the device, casts dtypes and calls further hooks.

    Attributes:
        before: hooks called with the batch as the loader returned it.
        transfer: copies the batch to the device; None if no copy is needed.
        after: casts and hooks called with the batch on the device.
        device: the device to which batches can be prefetched; None if the transfer is overridden.
    """

    before: Sequence[Move]
    transfer: Move | None
    after: Sequence[Move]
    device: torch.device | None
    _prefetcher: Prefetcher | None = field(default=None, init=False)

    def __call__(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch of one of an evaluation's loaders, ready for its step."""
        batch = self.prepare(batch, dataloader_idx)
        if self.transfer is not None:
            batch = self.transfer(batch, dataloader_idx)
        return self.finish(batch, dataloader_idx)

    def prepare(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Call the hooks that run before the copy."""
        for hook in self.before:
            batch = hook(batch, dataloader_idx)
        return batch

    def finish(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Apply casts and hooks after the copy, on the step's CUDA stream: user code does not synchronise streams."""
        for change in self.after:
            batch = change(batch, dataloader_idx)
        return batch

    @property
    def prefetcher(self) -> Prefetcher | None:
        """The prefetcher of the run; None on CPU. There is only one, since CUDA streams do not share freed memory."""
        if self._prefetcher is None and self.device is not None and self.device.type == "cuda":
            self._prefetcher = Prefetcher(self.device)
        return self._prefetcher

    def move_all(self, micro_batches: Iterator[MicroBatch], ahead: bool, fresh_memory: bool) -> Iterator[MicroBatch]:
        """Yield micro-batches on the device. On CUDA the next one is copied, on another stream, during a step.

        Args:
            micro_batches: the micro-batches of an epoch.
            ahead: whether the next batch may be read before the current one is trained on.
            fresh_memory: whether each batch has memory of its own, so that reading the next one does not overwrite it.
        """
        prefetcher = self.prefetcher
        if prefetcher is None or not ahead:
            move = self if prefetcher is None else safe_move(self, fresh_memory)
            for micro_batch in micro_batches:
                micro_batch.batch = move(micro_batch.batch, 0)
                yield micro_batch
            return
        pending: MicroBatch | None = None
        for coming in chain(micro_batches, (None,)):  # at None, only the pending batch is left
            copying = None
            if coming is not None:
                batch = coming.batch if fresh_memory else copy_pinned_tensors(coming.batch)
                copying = coming.with_batch(prefetcher.send(self.prepare(batch)))
            if pending is not None:
                pending.batch = self.finish(prefetcher.receive(pending.batch))
                yield pending
            pending = copying


def build_batch_mover(module: TrainModule, datamodule: DataModule | None, strategy: Strategy) -> BatchMover | None:
    """Return the mover for a run's batches; None if batches need neither hooks nor a copy nor casts."""
    before = _hooks("on_before_batch_transfer", module, datamodule)
    after = _hooks("on_after_batch_transfer", module, datamodule)
    override = _transfer_override(module, datamodule, strategy)
    precision = strategy.precision
    only_copies = override is None and not is_overridden("to_device", strategy, Strategy)
    if only_copies and strategy.device.type == "cpu":
        transfer = None
    else:
        transfer = override or (lambda batch, dataloader_idx: strategy.to_device(batch))
    is_converted = is_overridden("convert_batch", precision, Precision)
    converts = (lambda batch, dataloader_idx: precision.convert_batch(batch),) if is_converted else ()
    if not (before or after or transfer or converts):
        return None
    return BatchMover(before, transfer, (*converts, *after), strategy.device if only_copies else None)


def safe_move(move: Move, fresh_memory: bool) -> Move:
    """Return ``move``, copying the batch first if the loader may reuse its memory during an asynchronous copy."""
    return move if fresh_memory else lambda batch, dataloader_idx: move(copy_pinned_tensors(batch), dataloader_idx)


def _hooks(name: str, module: TrainModule, datamodule: DataModule | None) -> tuple[Move, ...]:
    hooks: list[Move] = []
    if datamodule is not None and is_overridden(name, datamodule, DataModule):
        hooks.append(getattr(datamodule, name))
    if is_overridden(name, module, ModuleHooks):
        hooks.append(getattr(module, name))
    return tuple(hooks)


def _transfer_override(module: TrainModule, datamodule: DataModule | None, strategy: Strategy) -> Move | None:
    """Return ``transfer_batch_to_device`` of the module or else of the data module; None if neither overrides it."""
    name = "transfer_batch_to_device"
    for owner, base in ((module, TrainModule), (datamodule, DataModule)):
        if owner is not None and is_overridden(name, owner, base):
            hook = getattr(owner, name)
            return lambda batch, dataloader_idx: hook(batch, strategy.device, dataloader_idx)
    return None


class InFlight(NamedTuple):
    """A batch that is being copied, and the event that marks the end of the copy."""

    batch: Any
    arrived: torch.cuda.Event


class Prefetcher:
    """Copies batches to a CUDA device on a separate stream.

    Call `send` with the next batch, compute on the current batch, then call `receive` to get the next batch. Neither
    call blocks the host. Tensors are pinned before they are copied.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._has_unknown_objects = False

    def send(self, batch: Any) -> InFlight:
        """Start copying a batch."""
        if self._has_unknown_objects:
            # `record_stream` cannot be called for tensors in unknown objects, so this copy could reuse memory that an
            # earlier step still reads.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = self._copy(batch)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return InFlight(moved, arrived)

    def receive(self, sent: InFlight) -> Any:
        """Return the copied batch, after making the current stream wait for the copy."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.arrived)

        def record_use(value: Any) -> Any:
            if not isinstance(value, Tensor):
                self._has_unknown_objects = True
            elif value.is_cuda:
                # The allocator must not give the memory to a later copy while this stream still uses it.
                value.record_stream(current)
            return value

        map_tensors(sent.batch, record_use)
        return sent.batch

    def _copy(self, batch: Any) -> Any:
        return move_to(map_tensors(batch, _pin), self._device, non_blocking=True)


def _pin(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        return value if value.is_pinned() else value.pin_memory()
    return value
