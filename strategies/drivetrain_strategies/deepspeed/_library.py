"""Imports DeepSpeed when a run needs it, refuses a missing or untested one, and redirects DeepSpeed's output."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from importlib.metadata import version
from typing import Any

from drivetrain.errors import ConfigurationError

VERSIONS = ">=0.19.8,<0.20"
"""The versions that have the private names which the strategy uses; see ``docs/versions.md``."""

_VARIABLE_SET_BY_IMPORT = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""An environment variable that importing DeepSpeed sets."""

logger = logging.getLogger("drivetrain.deepspeed")


def check_library() -> None:
    """Refuse a DeepSpeed that is missing, too old or too new, without importing the package.

    Raises:
        ConfigurationError: says what to install.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigurationError(
            "strategy='deepspeed', but the package deepspeed is not installed.",
            "the strategy uses DeepSpeed's own engine.",
            "pip install 'drivetrain[deepspeed]'; no compiler is needed (DS_BUILD_OPS=0).",
        )
    # Imported here, since lightning_utilities imports unittest.mock, which imports asyncio and ssl.
    from lightning_utilities.core.imports import RequirementCache

    if not RequirementCache(f"deepspeed{VERSIONS}"):
        raise ConfigurationError(
            f"deepspeed {version('deepspeed')} is installed, but {VERSIONS} is required.",
            "the strategy uses private names of DeepSpeed's engine, which change between releases.",
            f"pip install 'deepspeed{VERSIONS}', or use strategy='fsdp'.",
        )


def import_library() -> Any:
    """Import DeepSpeed and return the package, without changing environment variables."""
    value_before = os.environ.get(_VARIABLE_SET_BY_IMPORT)
    with redirected_log():
        deepspeed = importlib.import_module("deepspeed")
    if value_before is None:
        os.environ.pop(_VARIABLE_SET_BY_IMPORT, None)
    return deepspeed


@contextmanager
def redirected_log() -> Iterator[None]:
    """Redirect DeepSpeed's log to "drivetrain.deepspeed" within this context. Messages below ERROR become DEBUG."""

    def redirect(record: logging.LogRecord) -> bool:
        logger.log(logging.DEBUG if record.levelno < logging.ERROR else record.levelno, "%s", record.getMessage())
        return False

    theirs = logging.getLogger("DeepSpeed")
    level = theirs.level
    theirs.addFilter(redirect)  # rather than a handler, since DeepSpeed's first import creates its own
    if logger.isEnabledFor(logging.DEBUG):
        theirs.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        theirs.removeFilter(redirect)
        theirs.setLevel(level)


def redirected_prints() -> AbstractContextManager[Any]:
    """Return a context that redirects standard output to the logger "drivetrain.deepspeed"."""
    return redirect_stdout(_LogWriter())


class _LogWriter(io.TextIOBase):
    def write(self, text: str) -> int:
        if text.strip():
            logger.debug("%s", text.rstrip())
        return len(text)
