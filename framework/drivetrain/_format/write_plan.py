"""Assigns tensors to files and files to ranks. Every rank computes the same plan without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain._format.tensor_file import Spec, in_file_order

SMALL_BYTES = 64 * 2**20
"""A part is not split into files that are smaller than this."""
LARGE_BYTES = 8 * 2**30
"""A part that is larger than this is split into several files even on one rank."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of tensors that will be written.

    Attributes:
        name: name of the file.
        owner: the rank that writes it.
        specs: the tensors in the file, in file order.
    """

    name: str
    owner: int
    specs: tuple[Spec, ...]


def plan_files(stem: str, specs: Sequence[Spec], world_size: int) -> list[PlannedFile]:
    """Assign tensors to files in order, balanced by bytes, and files to ranks.

    Args:
        stem: beginning of the file names.
        specs: the tensors, in the same order on every rank.
        world_size: number of ranks that may write.
    """
    if not specs:
        return []
    total = sum(spec.nbytes for spec in specs)
    count = max(1, min(world_size, total // SMALL_BYTES), -(-total // LARGE_BYTES))
    contents: list[list[Spec]] = [[] for _ in range(count)]
    begin = 0
    for spec in specs:
        # A tensor is assigned by its midpoint. A file exceeds its share by at most half of its first and last tensors.
        middle = begin + spec.nbytes // 2
        contents[min(count * middle // max(total, 1), count - 1)].append(spec)
        begin += spec.nbytes
    contents = [specs_of_file for specs_of_file in contents if specs_of_file]
    count = len(contents)
    names = [f"{stem}-{number + 1:05d}-of-{count:05d}" for number in range(count)] if count > 1 else [stem]
    return [
        PlannedFile(f"{name}.safetensors", number * world_size // count, tuple(in_file_order(specs_of_file)))
        for number, (name, specs_of_file) in enumerate(zip(names, contents, strict=True))
    ]
