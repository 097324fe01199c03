"""Validates the structure of a run's saved state before the state is restored."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from drivetrain._runtime.generators import preserved_generators, restore_generators
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.checkpoint._format import Checkpoint

_INVALID_VALUE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
_HOST = torch.device("cpu")

Check = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _is_callback(value: Any) -> bool:
    return _is_dict(value) and "state" in value and _is_dict(value.get("extra"))


def _are_groups(value: Any, optimizers: int) -> bool:
    """Return whether a value describes the groups of this number of optimizers."""
    return (
        _is_list(value)
        and len(value) == optimizers
        and all(_is_list(groups) and all(map(_is_group, groups)) for groups in value)
    )


def _are_settings(value: Any, schedulers: int) -> bool:
    """Return whether a value describes the settings of this number of schedulers."""
    return _is_list(value) and len(value) == schedulers and all(map(_is_dict, value))


def _is_group(value: Any) -> bool:
    return _is_dict(value) and _are_names(value.get("params")) and all(map(is_plain, value.values()))


def is_plain(value: Any) -> bool:
    """Return whether a value is of a type that the description of a parameter group contains."""
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, bool | int | float | str) for part in parts)


def _is_flattened(value: Any) -> bool:
    return _is_dict(value) and _are_names(value.get("names")) and type(value.get("per_rank")) is bool


def check_progress(checkpoint: Checkpoint) -> None:
    """Check that the saved counters are non-negative integers.

    Raises:
        CheckpointError: a counter is invalid. The error names the file and the key.
    """
    progress = checkpoint.progress
    for name in dict.fromkeys(("epoch", "global_step", *progress)):
        if not _is_count(progress.get(name)):
            raise _malformed(checkpoint, "manifest.json", f"progress/{name}", progress.get(name))


def check_state(checkpoint: Checkpoint) -> None:
    """Check the structure of the run's state.

    Raises:
        CheckpointError: the state is malformed. The error names the file and the key.
    """
    part = checkpoint.manifest.state
    file = "state.json" if part is None or part.document is None else part.document
    state = checkpoint.state()
    if not isinstance(state, dict):
        raise _malformed(checkpoint, file, "", state)
    world_size = checkpoint.manifest.world_size
    checks: dict[str, tuple[Any, Mapping[str, Check]]] = {
        "": (
            state,
            {
                "module": _is_dict,
                "datamodule": _is_dict,
                "callbacks": _is_dict,
                "schedulers": _is_list,
                "precision": _is_dict,
                "loop": _is_dict,
                "data": _is_dict,
            },
        ),
        "callbacks/": (state.get("callbacks"), dict.fromkeys(state.get("callbacks") or (), _is_callback)),
        "data/": (
            state.get("data"),
            {
                "seed": _is_count,
                "world_size": lambda value: _is_count(value) and 1 <= value <= world_size,
                "stride": lambda value: value is None or (_is_count(value) and value > 0),
                "epoch": lambda value: value == -1 or _is_count(value),
                "begins": lambda value: _is_list(value) and len(value) == 2 and all(map(_is_count, value)),
            },
        ),
    }
    for name in ("frozen", "trained"):  # checkpoints of older versions lack these keys
        if state.get(name) is not None:
            checks[""][1][name] = _are_names  # type: ignore[index]
    for prefix, (values, key_checks) in checks.items():
        for key, is_valid in key_checks.items():
            value = values.get(key) if isinstance(values, dict) else None
            if not is_valid(value) or (value is None and key not in values):
                raise _malformed(checkpoint, file, f"{prefix}{key}", value)
    flattened = state.get("flattened_optimizer_state", {})
    indices = {str(index) for index in range(len(checkpoint.manifest.optimizers))}
    if not _is_dict(flattened) or not (flattened.keys() <= indices and all(map(_is_flattened, flattened.values()))):
        raise _malformed(checkpoint, file, "flattened_optimizer_state", flattened)
    _check_loop(checkpoint, file, state["loop"])
    made_of = state.get("made_of")
    made_of = made_of if isinstance(made_of, dict) else {}
    for key, is_valid in (
        ("optimizers", _are_names),
        ("optimizer_groups", lambda value: _are_groups(value, len(made_of.get("optimizers", ())))),
        ("frozen_parameters", _are_names),
        ("scheduler_settings", lambda value: _are_settings(value, len(made_of.get("schedulers", ())))),
    ):
        if key in made_of and not is_valid(made_of[key]):
            raise _malformed(checkpoint, file, f"made_of/{key}", made_of[key])
    data = made_of.get("data")
    if isinstance(data, dict) and not _are_names(data.get("order", [])):
        raise _malformed(checkpoint, file, "made_of/data/order", data.get("order"))


def _check_loop(checkpoint: Checkpoint, file: str, loop: dict[str, Any]) -> None:
    if not loop:
        return
    if not isinstance(loop.get("asked_to_stop"), str | None):
        raise _malformed(checkpoint, file, "loop/asked_to_stop", loop.get("asked_to_stop"))
    plateaus = loop.get("plateaus", {})
    if not isinstance(plateaus, dict) or not all(key.isdecimal() and _is_count(at) for key, at in plateaus.items()):
        raise _malformed(checkpoint, file, "loop/plateaus", plateaus)
    if not _is_count(loop.get("flushed_at", 0)):
        raise _malformed(checkpoint, file, "loop/flushed_at", loop["flushed_at"])
    if type(loop.get("data_is_over")) is not bool:
        raise _malformed(checkpoint, file, "loop/data_is_over", loop.get("data_is_over"))
    validation = loop.get("validation")
    numbers = validation.values() if isinstance(validation, dict) else [None]
    is_valid = validation is None or (
        {"ran_at", "next_at"} <= validation.keys() and all(value == -1 or _is_count(value) for value in numbers)
    )
    if not is_valid:
        raise _malformed(checkpoint, file, "loop/validation", validation)


def check_rank_state(checkpoint: Checkpoint, rank: int, state: Any) -> None:
    """Check the structure of a rank's own state.

    Raises:
        CheckpointError: the state is malformed. The error names the file and the key.
    """
    ranks = checkpoint.manifest.ranks
    file = f"rank-{rank:05d}.json" if rank >= len(ranks) else str(ranks[rank].document)
    if not isinstance(state, dict):
        raise _malformed(checkpoint, file, "", state)
    for key in ("draws", "metrics"):
        if not isinstance(state.get(key), dict):
            raise _malformed(checkpoint, file, key, state.get(key))
    if state.get("source") is not None and not isinstance(state["source"], dict):
        raise _malformed(checkpoint, file, "source", state["source"])
    buffers = state.get("buffers", {})
    if not isinstance(buffers, dict) or not all(isinstance(buffer, torch.Tensor) for buffer in buffers.values()):
        raise _malformed(checkpoint, file, "buffers", buffers)
    with reporting_malformed(checkpoint, file, "draws"), preserved_generators(_HOST):
        for states in (*state["draws"]["ahead"], state["draws"]["now"]):
            restore_generators(states, _HOST)


def check_optimizer_groups(checkpoint: Checkpoint, index: int, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Check that saved parameter groups hold a number for each option that is a number in the optimizer's groups.

    Raises:
        CheckpointError: a value is not a number. The error names the file and the key.
    """
    file = str(checkpoint.manifest.optimizers[index].document)
    for number, (current, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=False)):
        for key, value in current.items():
            if not isinstance(value, int | float) or (key not in saved and key != "lr"):
                continue  # an option that the saving version of torch did not have yet keeps its default
            loaded = saved.get(key)
            length = loaded.numel() if isinstance(loaded, torch.Tensor) else int(isinstance(loaded, int | float))
            if length != 1 or (isinstance(loaded, int) and abs(loaded) >= 2**63):
                raise _malformed(checkpoint, file, f"param_groups/{number}/{key}", loaded)


@contextmanager
def reporting_malformed(checkpoint: Checkpoint, file: str, key: str) -> Iterator[None]:
    """Replace a built-in error that restoring a value raises by an error that names the file and the key.

    Raises:
        CheckpointError: the block raised a KeyError, TypeError, ValueError or similar error.
    """
    try:
        yield
    except _INVALID_VALUE_ERRORS as error:
        raise CheckpointError(
            f"The checkpoint {checkpoint.path!r} is malformed: {key!r} in {file} cannot be restored: "
            f"{type(error).__name__}: {error}.",
            "the value does not have the form that the object's state_dict returns.",
            "use another checkpoint, or load the weights alone with load_from_checkpoint.",
        ) from error


def _malformed(checkpoint: Checkpoint, file: str, key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {checkpoint.path!r} is malformed: {key or 'the whole'!r} in {file} is {reprlib.repr(value)}.",
        "a run cannot resume from it.",
        "use another checkpoint, or load the weights alone with load_from_checkpoint.",
    )
