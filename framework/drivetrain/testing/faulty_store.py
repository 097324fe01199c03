"""An object store that fails when it is told to: for tests of what a run does then."""

from __future__ import annotations

import fnmatch
import io
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

OPERATIONS = ("put", "get", "size", "list", "remove")


@dataclass
class StoreFault:
    """What goes wrong with an operation on some of a store's objects.

    Attributes:
        operation: one of "put", "get", "size", "list", "remove"; "*" is any.
        pattern: of the objects' keys, as `fnmatch` has it; of a listing, of the prefix that is asked for.
        error: what is raised; None raises nothing.
        times: how often it goes wrong; None for ever.
        after: how many such operations come through before.
        lost: the operation takes effect, and it is the answer that is lost.
        seconds: how long the operation takes besides.
        age: a listing lacks objects that are younger, in seconds.
        call: called before the operation: another writer's turn, or the end of this process.
    """

    operation: str
    pattern: str = "*"
    error: Exception | None = field(default_factory=lambda: OSError("503 Slow Down"))
    times: int | None = 1
    after: int = 0
    lost: bool = False
    seconds: float = 0.0
    age: float = 0.0
    call: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.operation not in (*OPERATIONS, "*"):
            raise ValueError(f"{self.operation!r} is none of {', '.join(OPERATIONS)} and '*'")

    def takes(self, operation: str, key: str) -> bool:
        """Whether this operation is one that goes wrong; counts it."""
        if self.operation not in (operation, "*") or not fnmatch.fnmatch(key, self.pattern):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
            return self.times >= 0
        return True


class FaultyStore:
    """A store whose objects are files of a local folder, so that several processes can share it.

    As in an object store there are keys, and no folders; an object is put whole or not at all, nothing is renamed, and
    what was put is read and listed at once. Faults and calls are each process's own.

    Args:
        folder: where the objects are.
        protocol: of the store's URLs.

    Attributes:
        calls: every operation and its key, in order.
        url: of the store's root.
    """

    def __init__(self, folder: str | os.PathLike[str], protocol: str = "faulty") -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.protocol = protocol
        self.url = f"{protocol}://store"
        self.calls: list[tuple[str, str]] = []
        self._faults: list[StoreFault] = []
        self._lock = threading.Lock()

    def fail(self, operation: str, pattern: str = "*", **how: Any) -> StoreFault:
        """Let an operation go wrong, see `StoreFault`; of several faults that fit, the first told of comes first."""
        fault = StoreFault(operation, pattern, **how)
        self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Let nothing go wrong any more."""
        self._faults.clear()

    def objects(self) -> list[str]:
        """Return the keys of all objects, by whoever they were put."""
        found = [path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith(".half-")]
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def mount(self) -> FaultyStore:
        """Let URLs of the protocol mean this store, in this process; returns it."""
        kind = type("FaultyFileSystem", (_FileSystem,), {"protocol": self.protocol, "store": self})
        fsspec.register_implementation(self.protocol, kind, clobber=True)
        return self

    # What the file system does

    def do(self, operation: str, key: str, work: Callable[[float], Any]) -> Any:
        with self._lock:
            self.calls.append((operation, key))
            fault = next((one for one in self._faults if one.takes(operation, key)), None)
        if fault is None:
            return work(0.0)
        if fault.call is not None:
            fault.call()
        if fault.seconds:
            time.sleep(fault.seconds)
        if fault.error is not None and not fault.lost:
            raise fault.error
        result = work(fault.age)
        if fault.error is not None:
            raise fault.error
        return result

    def put(self, key: str, content: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".half-{secrets.token_hex(8)}")
        half.write_bytes(content)
        os.replace(half, path)


class _FileSystem(AbstractFileSystem):  # type: ignore[misc]
    """fsspec's view of a `FaultyStore`."""

    cachable = False
    store: ClassVar[FaultyStore]

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        found = self.store.do("list", self._key(path), lambda age: self._listed(path, age))
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return dict(self.store.do("size", self._key(path), lambda age: self._info(path)))

    def exists(self, path: str, **options: Any) -> bool:
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        content: bytes = self.store.do("get", self._key(path), lambda age: self._content(path))
        return content[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.store.do("put", self._key(path), lambda age: self.store.put(self._key(path), bytes(value)))

    def rm_file(self, path: str) -> None:
        self.store.do("remove", self._key(path), lambda age: (self.store.folder / self._key(path)).unlink())

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.pipe_file(path2, self.cat_file(path1))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no folders."""

    def rmdir(self, path: str) -> None:
        """There are no folders."""

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        return io.BytesIO(self.cat_file(path)) if mode == "rb" else _Upload(self, path)

    def _key(self, path: str) -> str:
        return str(self._strip_protocol(path)).partition("/")[2].rstrip("/")

    def _content(self, path: str) -> bytes:
        try:
            return (self.store.folder / self._key(path)).read_bytes()
        except (IsADirectoryError, NotADirectoryError):
            raise FileNotFoundError(path) from None

    def _info(self, path: str) -> dict[str, Any]:
        name, place = self._strip_protocol(path), self.store.folder / self._key(path)
        if place.is_file():
            return {"name": name, "size": place.stat().st_size, "type": "file"}
        if not self._listed(path, 0.0):
            raise FileNotFoundError(path)
        return {"name": name, "size": 0, "type": "directory"}

    def _listed(self, path: str, age: float) -> list[dict[str, Any]]:
        """What lies under a prefix and is older than ``age`` seconds: objects, and the first parts of longer keys."""
        prefix, root = self._key(path), str(self._strip_protocol(path)).rstrip("/")
        found: dict[str, dict[str, Any]] = {}
        for key in self.store.objects():
            if prefix and not key.startswith(f"{prefix}/"):
                continue
            name, _, rest = key[len(prefix) :].lstrip("/").partition("/")
            try:
                status = (self.store.folder / key).stat()
            except FileNotFoundError:  # removed meanwhile
                continue
            if age and time.time() - status.st_mtime < age:
                continue
            kind, size = ("directory", 0) if rest else ("file", status.st_size)
            found[name] = {"name": f"{root}/{name}", "size": size, "type": kind}
        return list(found.values())


class _Upload(io.BytesIO):
    """An object that is put as the stream is closed."""

    def __init__(self, filesystem: _FileSystem, path: str) -> None:
        super().__init__()
        self._filesystem = filesystem
        self._path = path
        self._open = True

    def discard(self) -> None:
        """Put nothing."""
        self._open = False

    def close(self) -> None:
        if self._open:
            self._open = False
            self._filesystem.pipe_file(self._path, self.getvalue())
        super().close()
