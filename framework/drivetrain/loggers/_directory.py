"""A run's own directory, ``<root>/<name>/version_<n>``, made at the first write and not before."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import fsspec

_VERSION = re.compile(r"version_(\d+)$")


class RunDirectory:
    """The directory of one run below a local path or any fsspec URL.

    Args:
        root: a local path or a URL such as ``s3://bucket/logs``.
        name: the experiment's sub-directory; empty for none.
        version: a number, a directory name, or ``None`` for the first free number. The number is settled when it
            is first needed: at a write, or when somebody asks for it.
    """

    def __init__(self, root: str, name: str, version: int | str | None) -> None:
        self.root = root
        self.name = name
        self._version = f"version_{version}" if isinstance(version, int) else version
        self._made = False

    @property
    def filesystem(self) -> fsspec.AbstractFileSystem:
        """The file system that `root` lives on."""
        import fsspec  # reads the entry points of every package there is, and a run that logs nothing need not wait

        return fsspec.core.url_to_fs(self.root)[0]

    @property
    def is_local(self) -> bool:
        """True where files are on a file system of this machine, which can append."""
        return "file" in _protocols(self.filesystem)

    @property
    def version(self) -> str:
        """The run's directory name; settles it."""
        if self._version is None:
            self._version = f"version_{self._next_number()}"
        return self._version

    def adopt(self, version: str) -> None:
        """Settle the directory name on another process's."""
        self._version = version

    @property
    def path(self) -> str:
        """The run's directory as the user would write it, with the URL's scheme."""
        return _join(self._parent, self.version)

    def make(self) -> str:
        """Create the directory if need be, and return `path`.

        A number that nobody has seen yet is claimed: where two runs start at once, the second takes the next one.
        """
        if not self._made:
            filesystem = self.filesystem
            if self._version is None and self.is_local:
                filesystem.makedirs(self._parent, exist_ok=True)
                number = self._next_number()
                while not _claim(filesystem, _join(self._parent, f"version_{number}")):
                    number += 1
                self._version = f"version_{number}"
            else:
                filesystem.makedirs(self.path, exist_ok=True)
            self._made = True
        return self.path

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process writes where this one says it does.
        return self.__dict__ | {"_version": self.version}

    def file(self, name: str) -> str:
        """The path of the file ``name`` in this directory."""
        return _join(self.path, name)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write ``values`` to the file ``name``; what JSON does not know is written as its text."""
        self.make()
        with self.filesystem.open(self.file(name), "w", encoding="utf-8") as stream:
            json.dump(dict(values), stream, indent=2, default=str)
            stream.write("\n")

    @property
    def _parent(self) -> str:
        return _join(self.root, self.name) if self.name else self.root

    def _next_number(self) -> int:
        try:
            entries = self.filesystem.ls(self._parent, detail=False)
        except FileNotFoundError:
            return 0
        found = (_VERSION.search(str(entry).rstrip("/")) for entry in entries)
        return max((int(match.group(1)) + 1 for match in found if match), default=0)


def _protocols(filesystem: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _join(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}" if root.rstrip("/") else f"{root}{name}"


def _claim(filesystem: fsspec.AbstractFileSystem, path: str) -> bool:
    try:
        filesystem.makedirs(path, exist_ok=False)
    except FileExistsError:
        return False
    return True
