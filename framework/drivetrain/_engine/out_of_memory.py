"""Out of memory: what takes it, and which setting would take less. Said in a note on the error, which stays itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drivetrain._distributed.failure import RankFailedError
from drivetrain._runtime.size_format import format_size

if TYPE_CHECKING:
    from drivetrain._engine.session_state import SessionState
    from drivetrain._runtime.memory_advice import MemoryAdvice

# What torch's allocator of the host's memory says; a device's has an error of its own.
_SAID = re.compile(r"can't allocate memory|not enough memory|Cannot allocate memory")
_KINDS = ("OutOfMemoryError", "MemoryError")
_LARGEST = 5


class _Tensor(NamedTuple):
    """A tensor that was alive, by a name that its owner knows."""

    kind: str
    name: str
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was what lacked: a device's or the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


def failed_for_memory(error: BaseException) -> bool:
    """Whether a run ended because memory lacked, on this rank or on another that has said so."""
    if not isinstance(error, RankFailedError):
        return is_out_of_memory(error)
    failure = error.failure
    kind = (failure.error_type or "").rpartition(".")[2]
    return kind in _KINDS or (kind == "RuntimeError" and _SAID.search(failure.message) is not None)


def explain_out_of_memory(error: BaseException, session: SessionState) -> None:
    """Add to an error for want of memory which tensors were the largest, and what to change first.

    To be called before anything is let go of. Does nothing for other errors, and never fails itself.
    """
    try:
        if is_out_of_memory(error):
            error.add_note(_note(error, session))
    except Exception:
        return


def _note(error: BaseException, session: SessionState) -> str:
    tensors = _distinct([*_of_the_run(session), *_of_the_frames(error)])
    totals: dict[str, int] = {}
    for one in tensors:
        totals[one.kind] = totals.get(one.kind, 0) + one.nbytes
    strategy, progress = session.strategy, session.progress
    where = f"rank {strategy.rank}, {strategy.device}, {session.stage}, global_step={progress.global_step}"
    lines = [f"Out of memory on {where}. On this rank there were:"]
    lines.append("  " + ", ".join(f"{kind} {_size(nbytes)}" for kind, nbytes in totals.items()))
    if strategy.device.type == "cuda":
        held, reserved = torch.cuda.memory_allocated(strategy.device), torch.cuda.memory_reserved(strategy.device)
        lines.append(f"  on the device {_size(held)} in tensors, {_size(reserved)} reserved")
    lines.append("The largest tensors:")
    for one in sorted(tensors, key=lambda one: -one.nbytes)[:_LARGEST]:
        dtype = str(one.tensor.dtype).removeprefix("torch.")
        lines.append(f"  {_size(one.nbytes)}  {one.kind}: {one.name}, {dtype} of shape {tuple(one.tensor.shape)}")
    lines += [f"{'  then' if rank else 'Change first'}: {step}" for rank, step in enumerate(_cheaper(session, totals))]
    return "\n".join(lines)


# What was there


def _of_the_run(session: SessionState) -> Iterator[_Tensor]:
    names = {}
    for name, parameter in session.module.named_parameters():
        names[id(parameter)] = name
        yield _Tensor("parameters", name, _local(parameter))
        if parameter.grad is not None:
            yield _Tensor("gradients", name, _local(parameter.grad))
    for name, buffer in session.module.named_buffers():
        yield _Tensor("buffers", name, _local(buffer))
    for optimizer in session.optimizers:
        for parameter, state in getattr(optimizer, "state", {}).items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    name = f"{key} of {names.get(id(parameter), 'a parameter')}"
                    yield _Tensor("optimizer state", name, _local(value))


def _of_the_frames(error: BaseException) -> Iterator[_Tensor]:
    """Tensors in the variables of the functions that the error went through: inputs, activations, losses."""
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
        yield from (one for one in value if isinstance(one, torch.Tensor))
    elif type(value) is dict:
        yield from (one for one in value.values() if isinstance(one, torch.Tensor))


def _distinct(tensors: list[_Tensor]) -> list[_Tensor]:
    """Each piece of memory once, by the first name that it has."""
    found: dict[int, _Tensor] = {}
    for one in tensors:
        if one.tensor.device.type != "meta":
            found.setdefault(one.tensor.untyped_storage().data_ptr(), one)
    return [one for one in found.values() if one.nbytes]


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _size(nbytes: int) -> str:
    return format_size(nbytes, ".4g")


# What would take less


def _cheaper(session: SessionState, totals: dict[str, int]) -> list[str]:
    """What to change, first what costs least for the memory that is short."""
    state = sum(totals.get(kind, 0) for kind in ("parameters", "gradients", "optimizer state"))
    strategy = session.strategy
    used = torch.cuda.memory_allocated(strategy.device) if strategy.device.type == "cuda" else sum(totals.values())
    fitting = session.stage == "fit"
    own = strategy.memory_advice(session.module) if fitting else ()
    of_precision = strategy.precision.memory_advice()
    for_activations = _smaller_batches(session, fitting) + _on("activations", of_precision) + _on("activations", own)
    for_state = _on("state", own) + (_on("state", of_precision) if fitting else [])
    return for_state + for_activations if state > used / 2 and for_state else for_activations + for_state


def _on(what: str, advice: Iterable[MemoryAdvice]) -> list[str]:
    return [one.text for one in advice if one.lessens == what]


def _smaller_batches(session: SessionState, fitting: bool) -> list[str]:
    size = None if session.data is None else session.data.batch_size
    if size is not None and size <= 1:
        return []
    half = "half the batch_size" if size is None else f"batch_size={size // 2} instead of {size}"
    micro_batches = 2 * session.trainer.accumulate_grad_batches
    return [half + (f" with accumulate_grad_batches={micro_batches}: the same steps" if fitting else "")]
