"""Reads `torch.save` files from untrusted sources: only tensors and plain values, without executing code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from drivetrain.errors import CheckpointError


class Placeholder:
    """Replaces an object of a class that is not imported. It does nothing."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load_safely(path: Path) -> dict[str, Any]:
    """Read a `torch.save` file that holds a dict.

    The file may refer to any class. The class is not imported; its objects become placeholders.

    Raises:
        CheckpointError: the file holds no dict, or cannot be read.
    """
    try:
        with safe_globals([(Placeholder, name) for name in get_unsafe_globals_in_checkpoint(path)]):
            document = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{str(path)!r} cannot be read safely: {type(error).__name__}: {first_line}",
            "the file is a pickle, which can run arbitrary code; only tensors and plain values are read from it.",
            "if you trust its source, load it with torch.load(..., weights_only=False) in a separate process "
            "and save only its state_dict.",
        ) from error
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{str(path)!r} holds a {type(document).__name__}.", "a dict was expected.", "check the path."
        )
    return document
