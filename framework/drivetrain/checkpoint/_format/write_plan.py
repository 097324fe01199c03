"""Which file a tensor goes to, and which rank writes that file: the same answer on every rank, without talking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.checkpoint._format.tensor_file import Spec, in_file_order


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large things are on their way to a checkpoint, in bytes.

    Attributes:
        small: below it a file is not worth splitting.
        large: above it a file is split whatever the number of ranks, so that it stays easy to handle.
        piece: what travels between ranks at once, unless a single row of a tensor is larger.
    """

    small: int = 64 * 2**20
    large: int = 8 * 2**30
    piece: int = 2 * 2**20


DEFAULT_SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of tensors that is going to be written.

    Attributes:
        name: of the file.
        owner: the rank that writes it.
        specs: what it holds, in the order of the file.
    """

    name: str
    owner: int
    specs: tuple[Spec, ...]


def plan_files(stem: str, specs: Sequence[Spec], world_size: int, sizes: Sizes) -> list[PlannedFile]:
    """Deal tensors to files in their order, balanced by bytes, and the files to the ranks.

    Args:
        stem: how the names of the files begin.
        specs: in order; alike on every rank.
        world_size: how many ranks may write.
        sizes: where there is one file, and where there are more files than ranks.
    """
    if not specs:
        return []
    total = sum(spec.nbytes for spec in specs)
    count = max(1, min(world_size, total // sizes.small), -(-total // sizes.large))
    dealt: list[list[Spec]] = [[] for _ in range(count)]
    begin = 0
    for spec in specs:
        # By its middle, so that no file is off by more than half of its first and last tensor.
        middle = begin + spec.nbytes // 2
        dealt[min(count * middle // max(total, 1), count - 1)].append(spec)
        begin += spec.nbytes
    dealt = [held for held in dealt if held]
    count = len(dealt)
    names = [f"{stem}-{number + 1:05d}-of-{count:05d}" for number in range(count)] if count > 1 else [stem]
    return [
        PlannedFile(f"{name}.safetensors", number * world_size // count, tuple(in_file_order(held)))
        for number, (name, held) in enumerate(zip(names, dealt, strict=True))
    ]
