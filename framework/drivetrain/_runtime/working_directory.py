"""Makes paths independent of later changes of the working directory."""

from __future__ import annotations

import os
import re

from drivetrain.errors import ConfigurationError

REMOVED = "the working directory was removed"
"""The reason, for errors, why a relative path cannot be used."""

_NO_LOCAL_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|[^/]*::")  # a URL, also one that lacks a slash


def working_directory() -> str | None:
    """Return the working directory, or None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def lacks_its_start(path: str) -> bool:
    """Whether a path is relative and the working directory was removed."""
    return not (_NO_LOCAL_PATH.match(path) or os.path.isabs(path)) and working_directory() is None


def resolved_path(path: str | os.PathLike[str], argument: str) -> str:
    """Return a local path as an absolute one, with ``~`` expanded, so that ``os.chdir`` does not change its meaning.

    URLs are returned unchanged, and so are relative paths if the working directory was removed.

    Args:
        path: the path.
        argument: the argument that it was passed as, for the error.

    Raises:
        ConfigurationError: ``path`` is neither text nor a path object.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(
            f"{argument}={path!r} is not a path.",
            f"a {type(path).__name__} names no file or folder.",
            "pass text, such as 'runs' or 's3://bucket/runs', or a pathlib.Path.",
        )
    text = os.fspath(path)
    if _NO_LOCAL_PATH.match(text):
        return text
    text = os.path.expanduser(text)
    return text if lacks_its_start(text) else os.path.abspath(text)
