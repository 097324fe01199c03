"""What ranks tell each other as they write a checkpoint, and its form as plain values on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from drivetrain._distributed.shards import Box, Region, Span
from drivetrain.checkpoint._format.gathered_writes import Regions
from drivetrain.checkpoint._format.manifest import FileRecord, Part
from drivetrain.checkpoint._format.storage import JoinInfo
from drivetrain.checkpoint._format.tensor_file import DTYPES, NAMES, Spec


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What a rank brings.

    Attributes:
        path: where it saves to.
        ticket: rank 0's, to the place that it began.
        digests: of each part that ranks share, of what they must have alike.
        regions: of each of these parts, what the rank speaks for.
        state: what rank 0's state holds.
        digest: what rank 0 wants of each file besides its checksums.
    """

    path: str
    join_info: JoinInfo | None = None
    digests: list[str] = field(default_factory=list)
    regions: list[Regions] = field(default_factory=list)
    state: list[Spec] = field(default_factory=list)
    digest: str | None = None

    def plain_values(self) -> tuple[Any, ...]:
        """Return it as plain values."""
        regions = [{name: _encode_region(region) for name, region in part.items()} for part in self.regions]
        state = [(spec.name, NAMES[spec.dtype], tuple(spec.shape)) for spec in self.state]
        return self.path, self.join_info, self.digests, regions, state, self.digest

    @classmethod
    def decode(cls, plain_values: tuple[Any, ...]) -> Self:
        """Return what `plain_values` gave."""
        path, join_info, digests, regions, state, digest = plain_values
        return cls(
            path,
            join_info,
            digests,
            [{name: _decode_region(region) for name, region in part.items()} for part in regions],
            [Spec(name, DTYPES[dtype], shape) for name, dtype, shape in state],
            digest,
        )


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a rank has written.

    Attributes:
        written: its files, by name.
        parts: of the checkpoint as this rank knows them, by their roles.
    """

    written: dict[str, FileRecord]
    parts: Sequence[tuple[str, Part]]

    def plain_values(self) -> tuple[Any, ...]:
        """Return it as plain values."""
        written = {name: (record.size, record.crc32, record.sha256) for name, record in self.written.items()}
        return written, [(role, part.document, part.tensors, part.index) for role, part in self.parts]

    @classmethod
    def decode(cls, plain_values: tuple[Any, ...]) -> Self:
        """Return what `plain_values` gave."""
        written, parts = plain_values
        return cls(
            {name: FileRecord(*record) for name, record in written.items()},
            [(role, Part(*part)) for role, *part in parts],
        )


def _encode_region(region: Region | None) -> list[Any] | None:
    if region is None:
        return None
    if isinstance(region, Span):
        return ["span", region.start, region.stop]
    return ["box", [*region.offsets], [*region.sizes]]


def _decode_region(encoded: list[Any] | None) -> Region | None:
    if encoded is None:
        return None
    kind, first, second = encoded
    return Span(first, second) if kind == "span" else Box(tuple(first), tuple(second))
