"""Adds a note to out-of-memory errors that says what the weights take, and which settings would use less."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._distributed.failure import RankFailedError
from drivetrain._runtime.size_format import format_size

if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_core import RunCore

# Messages of torch's host allocator, which raises a plain RuntimeError. Device allocators have an error class.
_HOST_MESSAGES = re.compile(r"can't allocate memory|not enough memory|Cannot allocate memory")
_ERROR_TYPES = ("OutOfMemoryError", "MemoryError")


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


def explain_out_of_memory(error: BaseException, run: RunCore) -> None:
    """Add a note to an out-of-memory error with the sizes of the run's state and the settings to change first.

    The function has to be called before the run's tensors are freed. It leaves other errors unchanged and never raises.
    """
    try:
        if is_out_of_memory(error):
            error.add_note(_note(run))
    except Exception:
        return


def _note(run: RunCore) -> str:
    strategy, sizes = run.strategy, _state_sizes(run)
    position = f"rank {strategy.rank}, {strategy.device}, {run.stage}, global_step={run.progress.global_step}"
    held = ", ".join(f"{kind} {_size(nbytes)}" for kind, nbytes in sizes.items() if nbytes)
    lines = [f"Out of memory on {position}. On this rank there were:", f"  {held or 'no parameters'}"]
    if strategy.device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(strategy.device), torch.cuda.memory_reserved(strategy.device)
        lines.append(f"  on the device {_size(allocated)} in tensors, {_size(reserved)} reserved")
    lines += [f"{'  then' if index else 'Change first'}: {change}" for index, change in enumerate(_advice(run))]
    return "\n".join(lines)


def _state_sizes(run: RunCore) -> dict[str, int]:
    """Return the bytes of this rank's parameters, gradients and optimizer state."""
    parameters = list(run.module.parameters())
    states = [state for optimizer in run.optimization.optimizers for state in getattr(optimizer, "state", {}).values()]
    tensors: dict[str, list[Any]] = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer state": [value for state in states if isinstance(state, dict) for value in state.values()],
    }
    return {kind: sum(_local_bytes(tensor) for tensor in of_kind) for kind, of_kind in tensors.items()}


def _local_bytes(value: object) -> int:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return 0
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.nbytes


def _size(nbytes: int) -> str:
    return format_size(nbytes, ".4g")


def _advice(run: RunCore) -> list[str]:
    """Return the settings to change, the cheapest first."""
    fitting, size = run.stage == "fit", run.data.batch_size
    smaller = "half the batch_size" if size is None else f"batch_size={size // 2} instead of {size}"
    if fitting:
        smaller += f" with accumulate_grad_batches={2 * run.trainer.accumulate_grad_batches}: the same steps"
    batches = [] if size is not None and size <= 1 else [smaller]
    return [
        *batches,
        *run.strategy.precision.memory_advice(),
        *(run.strategy.memory_advice(run.module) if fitting else ()),
    ]
