"""The classes for findings of the emulation, and the text of each finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator on a device.

    Attributes:
        name: the operator's name, such as ``add_`` or ``copy_``.
        stream: the device and the stream's id: ``cuda:0/default`` or ``cuda:1/7``.
        where: lines of the calling code, the innermost first, without the lines of torch.
    """

    name: str
    stream: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} on stream {self.stream}" + "".join(f"\n      {line}" for line in self.where)


@dataclass(frozen=True, slots=True)
class Race:
    """Two unordered operations on the same bytes. At least one of the operations writes.

    Attributes:
        earlier: the operation that the host called first. A device may run it second.
        later: the other operation, or None if the host itself wrote to pinned memory.
        what: the kinds of both operations, such as "write after read".
        size: the number of bytes that both operations access.
    """

    earlier: Operation
    later: Operation | None
    what: str
    size: int

    def __str__(self) -> str:
        if self.later is None:
            change = f"{self.size} bytes of pinned memory were changed by the host while this operation read them"
            return f"{change}\n    {self.earlier}"
        sides = f"earlier: {self.earlier}\n    later: {self.later}"
        return f"unordered {self.what} of {self.size} bytes\n    {sides}"


@dataclass(frozen=True, slots=True)
class FreeInUse:
    """Memory that was freed and reused while an operation on another stream might still use it.

    Attributes:
        use: the operation. `Tensor.record_stream` was not called for the stream of the operation, and nothing orders
            the operation before the reuse.
        owner: the stream on which the memory was allocated.
        where: the lines that freed the memory.
        size: the size of the memory in bytes.
    """

    use: Operation
    owner: str
    where: tuple[str, ...]
    size: int

    def __str__(self) -> str:
        freed = "".join(f"\n      {line}" for line in self.where)
        return f"{self.size} bytes of stream {self.owner} freed while in use\n    used: {self.use}\n    freed:{freed}"


@dataclass(frozen=True, slots=True)
class HostSync:
    """A wait of the host for a device, other than for a copy.

    Attributes:
        what: the operator whose result the host needs, such as "item", or else "synchronize", "Stream.synchronize" or
            "Event.synchronize".
        device: the device's index.
        stream: the device's current stream.
        where: lines of the calling code, the innermost first.
    """

    what: str
    device: int
    stream: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"the host waited for cuda:{self.device}: {self.what}" + "".join(
            f"\n      {line}" for line in self.where
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between the host and a device.

    Attributes:
        direction: "to the device" or "to the host".
        size: the size of the copy in bytes.
        pinned: whether the host's memory is pinned.
        blocking: whether the host waited for the copy, because of ``non_blocking=False``, pageable memory, or different
            dtypes or layouts.
        device: the device's index.
        stream: the stream of the copy.
        where: lines of the calling code, the innermost first.
    """

    direction: str
    size: int
    pinned: bool
    blocking: bool
    device: int
    stream: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        kind = f"{'blocking' if self.blocking else 'asynchronous'} copy {self.direction}"
        memory = "pinned" if self.pinned else "pageable"
        lines = "".join(f"\n      {line}" for line in self.where)
        return f"{kind} of {self.size} bytes, {memory} memory, on stream {self.stream}{lines}"


Finding = TypeVar("Finding", Race, FreeInUse, HostSync, Copy)


def format_findings(findings: Iterable[Finding]) -> str:
    """Return the findings as text. Equal findings are listed once, with their number."""
    counts = Counter(map(str, findings))
    return "\n".join(f"  {f'{count} times: ' if count > 1 else ''}{text}" for text, count in counts.items())
