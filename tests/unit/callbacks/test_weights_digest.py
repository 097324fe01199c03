"""Checksums of shards add up to the checksum of the whole tensor (L-03)."""

from __future__ import annotations

import torch

from drivetrain._distributed.checksum import checksum, checksum_share
from drivetrain._distributed.shards import Box, ParameterShard, Span, cut


def test_the_sums_of_all_parts_are_that_of_the_whole() -> None:  # L-03
    shape = (5, 4, 3)
    boxes = [
        Box((row, column, 0), (rows, columns, 3))
        for row, rows in ((0, 2), (2, 3))
        for column, columns in ((0, 1), (1, 3))
    ]
    spans = [Span(0, 7), Span(7, 40), Span(40, 60)]
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
        whole = torch.randn(shape).mul(100).to(dtype)
        expected = int(checksum(whole))
        for regions in (boxes, spans):
            parts = [checksum_share(ParameterShard(cut(whole, one), shape, one), rank=1) for one in regions]
            assert int(torch.stack(parts).sum()) == expected, (dtype, regions)
        swapped = whole.flip(0)
        assert int(checksum(swapped)) != expected
