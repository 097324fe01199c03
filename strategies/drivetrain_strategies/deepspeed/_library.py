"""The library itself: imported when a run needs it, refused where it is missing or old, and made to keep quiet."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
from contextlib import AbstractContextManager, redirect_stdout
from importlib.metadata import version
from typing import Any

from drivetrain.errors import ConfigurationError

OLDEST = "0.19.8"
"""The first that has all names of `_required_internals.py`."""

_IMPORT_SETS = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""An environment variable that its import leaves behind."""

logger = logging.getLogger("drivetrain.deepspeed")


def check_library() -> None:
    """Refuse a DeepSpeed that is not there or too old. Imports nothing.

    Raises:
        ConfigurationError: says what to install.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigurationError(
            "strategy='deepspeed', and the package deepspeed is not installed.",
            "the strategy drives DeepSpeed's own engine.",
            "pip install 'drivetrain[deepspeed]'; no compiler is needed (DS_BUILD_OPS=0).",
        )
    # Imported here: lightning_utilities imports unittest.mock, and with it asyncio and ssl.
    from lightning_utilities.core.imports import RequirementCache

    if not RequirementCache(f"deepspeed>={OLDEST}"):
        raise ConfigurationError(
            f"deepspeed {version('deepspeed')} is installed, and {OLDEST} or newer is needed.",
            "older engines lack names by which the strategy drives them.",
            f"pip install 'deepspeed>={OLDEST}'.",
        )


def import_library() -> Any:
    """Import DeepSpeed, leaving the environment as it was; returns the package."""
    check_library()
    before = os.environ.get(_IMPORT_SETS)
    with Quiet():
        deepspeed = importlib.import_module("deepspeed")
    if before is None:
        os.environ.pop(_IMPORT_SETS, None)
    return deepspeed


class Quiet(logging.Filter):
    """While entered, what DeepSpeed logs goes to "drivetrain.deepspeed" at debug level. Its errors stay errors."""

    def __init__(self) -> None:
        super().__init__()
        self._theirs = logging.getLogger("DeepSpeed")
        self._level = self._theirs.level

    def __enter__(self) -> Quiet:
        # A filter and not a handler: the first import makes the handler.
        self._theirs.addFilter(self)
        self._level = self._theirs.level
        if logger.isEnabledFor(logging.DEBUG):
            self._theirs.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        self._theirs.removeFilter(self)
        self._theirs.setLevel(self._level)

    def filter(self, record: logging.LogRecord) -> bool:
        level = logging.DEBUG if record.levelno < logging.ERROR else record.levelno
        logger.log(level, "%s", record.getMessage())
        return False


def prints_hidden() -> AbstractContextManager[Any]:
    """Return a context within which what is printed goes to the same logger."""
    return redirect_stdout(_Lines())


class _Lines(io.TextIOBase):
    def write(self, text: str) -> int:
        if text.strip():
            logger.debug("%s", text.rstrip())
        return len(text)
