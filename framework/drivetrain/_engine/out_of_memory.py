"""Adds a note to out-of-memory errors that says what uses the memory, and which settings would use less."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from drivetrain._distributed.failure import RankFailedError
from drivetrain._runtime.size_format import format_size

if TYPE_CHECKING:
    from drivetrain._engine.run_parts import RunCore
    from drivetrain._runtime.memory_advice import MemoryAdvice

# Messages of torch's host allocator, which raises a plain RuntimeError. Device allocators have an error class.
_HOST_MESSAGES = re.compile(r"can't allocate memory|not enough memory|Cannot allocate memory")
_ERROR_TYPES = ("OutOfMemoryError", "MemoryError")
_MAX_LISTED_TENSORS = 5


class _Tensor(NamedTuple):
    """A live tensor, with a name that the user recognises."""

    kind: str
    name: str
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that device or host memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _HOST_MESSAGES.search(str(error)) is not None


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether a run failed because memory ran out, on this rank or on another one that reported it."""
    if not isinstance(error, RankFailedError):
        return is_out_of_memory(error)
    failure = error.failure
    kind = (failure.error_type or "").rpartition(".")[2]
    return kind in _ERROR_TYPES or (kind == "RuntimeError" and _HOST_MESSAGES.search(failure.message) is not None)


def explain_out_of_memory(
    error: BaseException, run: RunCore, optimizers: Sequence[Optimizer], batch_size: int | None
) -> None:
    """Add a note to an out-of-memory error that lists the largest tensors and the settings to change first.

    The function has to be called before the run's tensors are freed. It leaves other errors unchanged and never raises.
    """
    try:
        if is_out_of_memory(error):
            error.add_note(_note(error, run, optimizers, batch_size))
    except Exception:
        return


def _note(error: BaseException, run: RunCore, optimizers: Sequence[Optimizer], batch_size: int | None) -> str:
    tensors = _distinct([*_run_tensors(run, optimizers), *_frame_tensors(error)])
    totals: dict[str, int] = {}
    for entry in tensors:
        totals[entry.kind] = totals.get(entry.kind, 0) + entry.nbytes
    strategy, progress = run.strategy, run.progress
    position = f"rank {strategy.rank}, {strategy.device}, {run.stage}, global_step={progress.global_step}"
    lines = [f"Out of memory on {position}. On this rank there were:"]
    lines.append("  " + ", ".join(f"{kind} {_size(nbytes)}" for kind, nbytes in totals.items()))
    if strategy.device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(strategy.device), torch.cuda.memory_reserved(strategy.device)
        lines.append(f"  on the device {_size(allocated)} in tensors, {_size(reserved)} reserved")
    lines.append("The largest tensors:")
    for entry in sorted(tensors, key=lambda entry: -entry.nbytes)[:_MAX_LISTED_TENSORS]:
        dtype, shape = str(entry.tensor.dtype).removeprefix("torch."), tuple(entry.tensor.shape)
        lines.append(f"  {_size(entry.nbytes)}  {entry.kind}: {entry.name}, {dtype} of shape {shape}")
    lines += [
        f"{'  then' if index else 'Change first'}: {change}"
        for index, change in enumerate(_advice(run, batch_size, totals))
    ]
    return "\n".join(lines)


# Collecting the live tensors


def _run_tensors(run: RunCore, optimizers: Sequence[Optimizer]) -> Iterator[_Tensor]:
    names = {}
    for name, parameter in run.module.named_parameters():
        names[id(parameter)] = name
        yield _Tensor("parameters", name, _local(parameter))
        if parameter.grad is not None:
            yield _Tensor("gradients", name, _local(parameter.grad))
    for name, buffer in run.module.named_buffers():
        yield _Tensor("buffers", name, _local(buffer))
    for optimizer in optimizers:
        for parameter, state in getattr(optimizer, "state", {}).items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    name = f"{key} of {names.get(id(parameter), 'a parameter')}"
                    yield _Tensor("optimizer state", name, _local(value))


def _frame_tensors(error: BaseException) -> Iterator[_Tensor]:
    """Yield the tensors in local variables of the frames in the traceback: inputs, activations, losses."""
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        for name, value in frame.f_locals.items():
            for tensor in _tensors_in(value):
                yield _Tensor("activations and batches", f"{name} in {frame.f_code.co_qualname}", _local(tensor))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, torch.Tensor))
    elif type(value) is dict:
        yield from (item for item in value.values() if isinstance(item, torch.Tensor))


def _distinct(tensors: list[_Tensor]) -> list[_Tensor]:
    """Return one tensor per storage, the first in the list, without empty tensors."""
    by_storage: dict[int, _Tensor] = {}
    for entry in tensors:
        if entry.tensor.device.type != "meta":
            by_storage.setdefault(entry.tensor.untyped_storage().data_ptr(), entry)
    return [entry for entry in by_storage.values() if entry.nbytes]


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _size(nbytes: int) -> str:
    return format_size(nbytes, ".4g")


# Advice


def _advice(run: RunCore, batch_size: int | None, totals: dict[str, int]) -> list[str]:
    """Return the settings to change, the most effective first.

    Settings that reduce parameters, gradients and optimizer state come first if these use more than half of the memory.
    """
    state = sum(totals.get(kind, 0) for kind in ("parameters", "gradients", "optimizer state"))
    strategy = run.strategy
    used = torch.cuda.memory_allocated(strategy.device) if strategy.device.type == "cuda" else sum(totals.values())
    fitting = run.stage == "fit"
    from_strategy = strategy.memory_advice(run.module) if fitting else ()
    from_precision = strategy.precision.memory_advice()
    for_activations = (
        _smaller_batches(run, batch_size, fitting)
        + _texts_about("activations", from_precision)
        + _texts_about("activations", from_strategy)
    )
    for_state = _texts_about("state", from_strategy) + (_texts_about("state", from_precision) if fitting else [])
    return for_state + for_activations if state > used / 2 and for_state else for_activations + for_state


def _texts_about(use: str, advice: Iterable[MemoryAdvice]) -> list[str]:
    return [each.text for each in advice if each.reduces == use]


def _smaller_batches(run: RunCore, size: int | None, fitting: bool) -> list[str]:
    if size is not None and size <= 1:
        return []
    half = "half the batch_size" if size is None else f"batch_size={size // 2} instead of {size}"
    micro_batches = 2 * run.trainer.accumulate_grad_batches
    return [half + (f" with accumulate_grad_batches={micro_batches}: the same steps" if fitting else "")]
