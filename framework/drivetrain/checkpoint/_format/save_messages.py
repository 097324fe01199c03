"""Messages that ranks exchange while writing a checkpoint, and their form as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Self

from drivetrain._distributed.shards import region_from
from drivetrain.checkpoint._format.manifest import FileRecord, Part
from drivetrain.checkpoint._format.tensor_file import DTYPES, NAMES, Spec
from drivetrain.checkpoint._format.tensor_writer import Regions


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What a rank is about to write.

    Attributes:
        values: digest of the values that must be the same on all ranks.
        token: what the other ranks need to join rank 0's publication; None on other ranks.
        regions: for each shared part, the regions that this rank writes.
        state: the tensors of rank 0's state; empty on other ranks.
        hash_algorithm: name of the hash to store for each file; None for none. The value on rank 0 is used.
    """

    values: str
    token: str | None = None
    regions: list[Regions] = field(default_factory=list)
    state: list[Spec] = field(default_factory=list)
    hash_algorithm: str | None = None

    def plain_values(self) -> tuple[Any, ...]:
        """Return the message as plain values."""
        regions = [
            {name: None if region is None else astuple(region) for name, region in part.items()}
            for part in self.regions
        ]
        state = [(spec.name, NAMES[spec.dtype], tuple(spec.shape)) for spec in self.state]
        return self.values, self.token, regions, state, self.hash_algorithm

    @classmethod
    def decode(cls, plain_values: tuple[Any, ...]) -> Self:
        """Return the message from its `plain_values`."""
        values, token, regions, state, hash_algorithm = plain_values
        return cls(
            values,
            token,
            [
                {name: None if bounds is None else region_from(bounds) for name, bounds in part.items()}
                for part in regions
            ],
            [Spec(name, DTYPES[dtype], shape) for name, dtype, shape in state],
            hash_algorithm,
        )


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a rank has written.

    Attributes:
        written: records of the files that this rank wrote, by name.
        parts: the parts that this rank staged, with their roles.
    """

    written: dict[str, FileRecord]
    parts: Sequence[tuple[str, Part]]

    def plain_values(self) -> tuple[Any, ...]:
        """Return the message as plain values."""
        written = {name: (record.size, record.crc32, record.sha256) for name, record in self.written.items()}
        return written, [(role, part.document, part.tensors, part.index) for role, part in self.parts]

    @classmethod
    def decode(cls, plain_values: tuple[Any, ...]) -> Self:
        """Return the message from its `plain_values`."""
        written, parts = plain_values
        return cls(
            {name: FileRecord(*record) for name, record in written.items()},
            [(role, Part(*part)) for role, *part in parts],
        )
