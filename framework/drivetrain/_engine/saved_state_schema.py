"""Whether what a checkpoint says of a run has the form that is written, asked before anything is taken from it."""

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

_WRONG_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
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


def check_progress(checkpoint: Checkpoint) -> None:
    """Refuse counters that are none.

    Raises:
        CheckpointError: names the file and the key.
    """
    progress = checkpoint.progress
    for name in dict.fromkeys(("epoch", "global_step", *progress)):
        if not _is_count(progress.get(name)):
            raise _malformed(checkpoint, "manifest.json", f"progress/{name}", progress.get(name))


def check_state(checkpoint: Checkpoint) -> None:
    """Refuse a run's state that is not in the form in which one is written.

    Raises:
        CheckpointError: names the file and the key.
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
    for name in ("frozen", "trained"):  # older versions have neither
        if state.get(name) is not None:
            checks[""][1][name] = _are_names  # type: ignore[index]
    for prefix, (values, wanted) in checks.items():
        for key, is_right in wanted.items():
            found = values.get(key) if isinstance(values, dict) else None
            if not is_right(found) or (found is None and key not in values):
                raise _malformed(checkpoint, file, f"{prefix}{key}", found)
    _check_loop(checkpoint, file, state["loop"])
    made_of = state.get("made_of")
    data = made_of.get("data") if isinstance(made_of, dict) else None
    if isinstance(data, dict) and not _are_names(data.get("order", [])):
        raise _malformed(checkpoint, file, "made_of/data/order", data.get("order"))


def _check_loop(checkpoint: Checkpoint, file: str, loop: dict[str, Any]) -> None:
    if not loop:
        return
    if not isinstance(loop.get("asked_to_stop"), str | None):
        raise _malformed(checkpoint, file, "loop/asked_to_stop", loop.get("asked_to_stop"))
    if type(loop.get("data_is_over")) is not bool:
        raise _malformed(checkpoint, file, "loop/data_is_over", loop.get("data_is_over"))
    validation = loop.get("validation")
    numbers = validation.values() if isinstance(validation, dict) else [None]
    right = validation is None or (
        {"ran_at", "next_at"} <= validation.keys() and all(value == -1 or _is_count(value) for value in numbers)
    )
    if not right:
        raise _malformed(checkpoint, file, "loop/validation", validation)


def check_rank_state(checkpoint: Checkpoint, rank: int, state: Any) -> None:
    """Refuse what a rank said of itself that is not in the form in which it is written.

    Raises:
        CheckpointError: names the file and the key.
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
    if not isinstance(buffers, dict) or not all(isinstance(one, torch.Tensor) for one in buffers.values()):
        raise _malformed(checkpoint, file, "buffers", buffers)
    with taking(checkpoint, file, "draws"), preserved_generators(_HOST):
        for states in (*state["draws"]["ahead"], state["draws"]["now"]):
            restore_generators(states, _HOST)


def check_groups(checkpoint: Checkpoint, index: int, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse an optimizer's settings that are no numbers where its own are.

    Raises:
        CheckpointError: names the file and the key.
    """
    file = str(checkpoint.manifest.optimizers[index].document)
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=False)):
        for key, value in own.items():
            if not isinstance(value, int | float) or (key not in saved and key != "lr"):
                continue  # what another version of torch did not have gets its default
            found = saved.get(key)
            number_of = found.numel() if isinstance(found, torch.Tensor) else int(isinstance(found, int | float))
            if number_of != 1 or (isinstance(found, int) and abs(found) >= 2**63):
                raise _malformed(checkpoint, file, f"param_groups/{number}/{key}", found)


@contextmanager
def taking(checkpoint: Checkpoint, file: str, key: str) -> Iterator[None]:
    """Turn an error that is due to what a document says into one that names the file and the key.

    Raises:
        CheckpointError: instead of an error of Python's about a value.
    """
    try:
        yield
    except _WRONG_FORM as error:
        raise CheckpointError(
            f"The checkpoint {checkpoint.path!r} is malformed: {key!r} in {file} cannot be taken back: "
            f"{type(error).__name__}: {error}.",
            "what it holds is not what was given out when it was saved.",
            "take another checkpoint, or load the weights alone with load_from_checkpoint.",
        ) from error


def _malformed(checkpoint: Checkpoint, file: str, key: str, found: Any) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {checkpoint.path!r} is malformed: {key or 'the whole'!r} in {file} is {reprlib.repr(found)}.",
        "a run cannot go on from that.",
        "take another checkpoint, or load the weights alone with load_from_checkpoint.",
    )
