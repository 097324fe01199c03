"""FaultyStore: an object store that fails on request, to test how runs handle such failures."""

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

_PARTIAL_PREFIX = ".partial-"  # the prefix of names of files that are still being written


@dataclass
class StoreFault:
    """A fault of an operation on some of a store's objects."""

    operation: str  # "put", "get", "size", "list" or "remove", or "*" for all of them
    pattern: str = "*"  # matched with the key of an object, or with the prefix for "list"
    error: Exception | None = field(default_factory=lambda: OSError("503 Slow Down"))  # None raises nothing
    times: int | None = 1  # how often the fault occurs; None: without limit
    after: int = 0  # how many matching operations succeed before the first fault
    lost: bool = False  # whether the operation takes effect before the error, as if only the response were lost
    seconds: float = 0.0  # an additional duration of the operation
    age: float = 0.0  # the age in seconds below which listings omit an object
    call: Callable[[], object] | None = None  # called before the operation, for example to act as another writer

    def takes(self, operation: str, key: str) -> bool:
        """Return True if the fault applies to this operation, and count it."""
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
    """An object store in a local folder, which processes share; faults and recorded calls are of one process."""

    url = "faulty://store"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.calls: list[tuple[str, str]] = []  # every operation and its key, in order
        self._faults: list[StoreFault] = []
        self._lock = threading.Lock()

    def fail(self, operation: str, pattern: str = "*", **options: Any) -> StoreFault:
        """Add a fault with the attributes of `StoreFault`. If several faults match, the first one added applies."""
        fault = StoreFault(operation, pattern, **options)
        self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def objects(self) -> list[str]:
        """Return the keys of all objects, including those of other processes."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        whole = [path for path in files if not path.name.startswith(_PARTIAL_PREFIX)]
        return sorted(path.relative_to(self.folder).as_posix() for path in whole)

    def mount(self) -> FaultyStore:
        """Register this store for URLs of its protocol in this process, and return it."""
        filesystem = type("FaultyFileSystem", (_FileSystem,), {"protocol": "faulty", "store": self})
        fsspec.register_implementation("faulty", filesystem, clobber=True)
        return self

    def do(self, operation: str, key: str, work: Callable[[float], Any]) -> Any:
        """Record an operation and execute it with the first fault that matches: ``work`` gets the fault's age, or 0."""
        with self._lock:
            self.calls.append((operation, key))
            fault = next((candidate for candidate in self._faults if candidate.takes(operation, key)), None)
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


class _FileSystem(AbstractFileSystem):
    """The fsspec interface of a `FaultyStore`."""

    cachable = False
    store: ClassVar[FaultyStore]

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        entries = self.store.do("list", self._key(path), lambda age: self._listed(path, age))
        return entries if detail else [entry["name"] for entry in entries]

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
        self.store.do("put", self._key(path), lambda age: self._write(self._file(path), bytes(value)))

    def rm_file(self, path: str) -> None:
        self.store.do("remove", self._key(path), lambda age: self._file(path).unlink())

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.pipe_file(path2, self.cat_file(path1))

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        return io.BytesIO(self.cat_file(path)) if mode == "rb" else _Upload(self, path)

    def _key(self, path: str) -> str:
        return str(self._strip_protocol(path)).partition("/")[2].rstrip("/")

    def _file(self, path: str) -> Path:
        return self.store.folder / self._key(path)

    def _content(self, path: str) -> bytes:
        try:
            return self._file(path).read_bytes()
        except (IsADirectoryError, NotADirectoryError):
            raise FileNotFoundError(path) from None

    def _write(self, file: Path, content: bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial_file = file.with_name(f"{_PARTIAL_PREFIX}{secrets.token_hex(8)}")
        partial_file.write_bytes(content)
        os.replace(partial_file, file)

    def _info(self, path: str) -> dict[str, Any]:
        name, file = self._strip_protocol(path), self._file(path)
        if file.is_file():
            return {"name": name, "size": file.stat().st_size, "type": "file"}
        if not self._listed(path, 0.0):
            raise FileNotFoundError(path)
        return {"name": name, "size": 0, "type": "directory"}

    def _listed(self, path: str, age: float) -> list[dict[str, Any]]:
        """Return the objects and next-level prefixes below a prefix that are older than ``age`` seconds."""
        prefix, root = self._key(path), str(self._strip_protocol(path)).rstrip("/")
        entries: dict[str, dict[str, Any]] = {}
        for key in self.store.objects():
            if prefix and not key.startswith(f"{prefix}/"):
                continue
            name, _, rest = key[len(prefix) :].lstrip("/").partition("/")
            try:
                status = (self.store.folder / key).stat()
            except FileNotFoundError:  # removed by another process
                continue
            if age and time.time() - status.st_mtime < age:
                continue
            kind, size = ("directory", 0) if rest else ("file", status.st_size)
            entries[name] = {"name": f"{root}/{name}", "size": size, "type": kind}
        return list(entries.values())


class _Upload(io.BytesIO):
    """An object that is put when the stream is closed."""

    def __init__(self, filesystem: _FileSystem, path: str) -> None:
        super().__init__()
        self._filesystem = filesystem
        self._path = path
        self._open = True

    def discard(self) -> None:
        """Close the stream without putting the object."""
        self._open = False

    def close(self) -> None:
        if self._open:
            self._open = False
            self._filesystem.pipe_file(self._path, self.getvalue())
        super().close()
