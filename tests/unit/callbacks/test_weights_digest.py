"""Checksums of tensors: every bit counts, and the checksums of shards add up to that of the tensor (L-03)."""

from __future__ import annotations

import pytest
import torch

from drivetrain._distributed.checksum import checksum, checksum_share, checksums
from drivetrain._distributed.shards import Box, ParameterShard, Span, cut

DTYPES = "float64 float32 bfloat16 float16 float8_e4m3fn int64 int8 uint8 complex64 complex128"


@pytest.mark.parametrize("name", DTYPES.split())
def test_one_bit_anywhere_changes_the_checksum(name: str) -> None:
    dtype = getattr(torch, name)
    original = torch.randint(-100, 100, (7, 5)).to(torch.float32).to(dtype)
    before = checksum(original)
    assert before.dtype == torch.int64
    assert checksum(original.clone()) == before
    size = dtype.itemsize
    for element in (0, 17, 34):
        for byte, bit in ((0, 1), (size - 1, 0x80)):
            changed = original.clone()
            changed.view(torch.uint8).view(-1)[element * size + byte] ^= bit
            assert checksum(changed) != before


def test_changes_that_cancel_in_a_sum_change_the_checksum() -> None:
    value = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert checksum(value.flip(0)) != checksum(value)
    assert checksum(torch.tensor([-1.0, 1.0])) != checksum(torch.tensor([1.0, -1.0]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_layouts_do_not_matter() -> None:
    value = torch.arange(12.0).reshape(3, 4)
    assert checksum(value.t()) == checksum(value.t().contiguous())
    assert checksum(value[:, ::2]) == checksum(value[:, ::2].contiguous())
    assert checksum(torch.eye(3).to_sparse()) == checksum(torch.eye(3))
    assert checksum(torch.zeros(0)) == checksum(torch.ones(3, device="meta")) == 0
    assert checksum(torch.tensor(True)) != checksum(torch.tensor(False))
    large = torch.arange((1 << 22) + 5)
    before = checksum(large)
    assert checksums([value, large]).tolist() == [int(checksum(value)), int(before)]
    large[-1] += 1
    assert checksum(large) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64], ids=str)
def test_the_checksums_of_all_shards_add_up(dtype: torch.dtype) -> None:  # L-03
    shape = (5, 4, 3)
    rows, columns = ((0, 2), (2, 3)), ((0, 1), (1, 3))  # start and length
    boxes = [Box((row, column, 0), (height, width, 3)) for row, height in rows for column, width in columns]
    whole = torch.randn(shape).mul(100).to(dtype)
    for regions in (boxes, [Span(0, 7), Span(7, 40), Span(40, 60)]):
        shards = [ParameterShard(cut(whole, region), shape, region) for region in regions]
        parts = [checksum_share(shard, rank=1) for shard in shards]
        assert int(torch.stack(parts).sum()) == int(checksum(whole)), regions
