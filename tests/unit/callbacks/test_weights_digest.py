"""Checksums of tensors: every bit counts (L-03). Those of shards add up: ``unit/checkpoint/test_base_weights.py``."""

from __future__ import annotations

import pytest
import torch

from drivetrain._distributed.checksum import checksum, checksums

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


def test_the_order_and_signs_matter_and_the_layout_does_not() -> None:
    value = torch.arange(12.0).reshape(3, 4)
    assert checksum(value.flip(0)) != checksum(value)
    assert checksum(torch.tensor([-1.0, 1.0])) != checksum(torch.tensor([1.0, -1.0]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
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
