"""Block checksums; the faster library computes the same ones."""

from __future__ import annotations

import random
import zlib

import pytest

from drivetrain.checkpoint._format.checksums import BlockChecksums, block_count


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 95, 100])
def test_portions_of_any_size_give_the_same(size: int) -> None:
    content = random.Random(0).randbytes(size)
    expected = "".join(f"{zlib.crc32(content[start : start + 10]):08x}" for start in range(0, size, 10))
    for portion in (1, 3, 10, 25, 100):
        sums = BlockChecksums(10)
        for start in range(0, size, portion):
            sums.update(content[start : start + portion])
        assert sums.text() == expected
        assert sums.size == size
    assert len(expected) == 8 * block_count(size, 10)
