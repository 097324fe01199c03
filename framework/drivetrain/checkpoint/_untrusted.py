"""Files of `torch.save` from anywhere: tensors and plain values are read, and nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from drivetrain.errors import CheckpointError


class Placeholder:
    """Stands for an object of a class that is not imported: does nothing."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load_safely(path: Path, is_allowed: Callable[[str], bool] = lambda name: False) -> dict[str, Any]:
    """Read a file of `torch.save` that holds a dict.

    Args:
        path: of the file.
        known: tells by its full name whether a class may be named in it besides. It is not imported: empty records
            stand for its objects.

    Raises:
        CheckpointError: it holds anything else, or cannot be read.
    """
    try:
        names = [name for name in get_unsafe_globals_in_checkpoint(path) if is_allowed(name)]
        with safe_globals([(Placeholder, name) for name in names]):
            document = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{str(path)!r} cannot be read safely: {type(error).__name__}: {first}",
            "it is a pickle, which runs whatever code it names; only tensors and plain values are read from one.",
            "if you trust its source, load it with torch.load(..., weights_only=False) in a process of your own and "
            "save its state_dict alone.",
        ) from error
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{str(path)!r} holds a {type(document).__name__}.", "a dict was expected.", "check the path."
        )
    return document
