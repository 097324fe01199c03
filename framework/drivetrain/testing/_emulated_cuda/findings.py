"""What an emulated device has seen, and how it says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator on a device.

    Attributes:
        name: the operator's, as ``add_`` or ``copy_``.
        stream: ``cuda:0/default`` or ``cuda:1/7``: the device, and the stream's id.
        where: lines of the caller, the innermost first; torch's own are left out.
    """

    name: str
    stream: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} on stream {self.stream}" + "".join(f"\n      {line}" for line in self.where)


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations on the same bytes, one of them a write, that nothing orders.

    Attributes:
        earlier: the one that the host called first. A device may run it second.
        later: the other one; None where it is the host that wrote to pinned memory.
        what: "read" or "write" of each, as "write after read".
        size: how many bytes both touch.
    """

    earlier: Operation
    later: Operation | None
    what: str
    size: int

    def __str__(self) -> str:
        if self.later is None:
            return (
                f"{self.size} bytes of pinned memory were changed by the host while this read them\n    {self.earlier}"
            )
        sides = f"earlier: {self.earlier}\n    later: {self.later}"
        return f"{self.what} of {self.size} bytes that nothing orders\n    {sides}"


@dataclass(frozen=True, slots=True)
class FreeInUse:
    """Memory that was freed, and given out again, while an operation on another stream might still use it.

    Attributes:
        use: the operation; `Tensor.record_stream` of its stream was not called, and nothing orders it before the reuse.
        owner: the stream that the memory was allocated on.
        where: who freed it.
        size: in bytes.
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
    """The host waited for a device, for another reason than a copy.

    Attributes:
        what: the operator whose result the host needs, as "item", or "synchronize", "Stream.synchronize" and
            "Event.synchronize".
        device: the device's index.
        stream: the stream that was current there.
        where: lines of the caller, the innermost first.
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
        size: in bytes.
        pinned: the host's side is pinned memory.
        blocking: the host waited for it: it was not asked for with ``non_blocking=True``, the memory is not pinned, or
            dtypes or layouts differ.
        device: the device's index.
        stream: the stream that carried it.
        where: lines of the caller, the innermost first.
    """

    direction: str
    size: int
    pinned: bool
    blocking: bool
    device: int
    stream: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        how = f"{'blocking' if self.blocking else 'asynchronous'} copy {self.direction}"
        memory = "pinned" if self.pinned else "pageable"
        lines = "".join(f"\n      {line}" for line in self.where)
        return f"{how} of {self.size} bytes, {memory} memory, on stream {self.stream}{lines}"


Finding = TypeVar("Finding", Race, FreeInUse, HostSync, Copy)


def told(findings: Iterable[Finding]) -> str:
    """Return the findings as lines, the same one once with how often it came."""
    counts = Counter(map(str, findings))
    return "\n".join(f"  {f'{count} times: ' if count > 1 else ''}{text}" for text, count in counts.items())
