"""Copies of a device's tensors in pinned memory, for saves in the background."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from drivetrain.checkpoint._format.pinned_copies import blocks, pinned_copies
from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from worlds import on_emulated_cuda


@pytest.mark.parametrize("kind", ["layers", "random"])
def test_little_memory_is_wasted_on_rounding(kind: str) -> None:  # O-02
    draw = random.Random(3)
    layer = [4 * 768 * 768, 4 * 768 * 3072, 4 * 768 * 3072, 4 * 768, 4 * 3072, 4 * 2304 * 768]
    sizes = 32 * layer if kind == "layers" else [64 * int(2 ** (draw.random() * 20)) for _ in range(300)]
    packed = blocks(sizes)
    assert sum(capacity for capacity, _ in packed) < 1.1 * sum(sizes)
    assert len(packed) <= 24


@pytest.mark.parametrize("sizes", [[], [0, 0, 64], [64, 64, 64], [2**20 + 64], [192, 128, 64]])
def test_tensors_do_not_overlap(sizes: list[int]) -> None:
    packed = blocks(sizes)
    placed = [index for _, members in packed for index, _ in members]
    assert sorted(placed) == list(range(len(sizes)))
    for capacity, members in packed:
        assert capacity & (capacity - 1) == 0
        ends = [0]
        for index, start in members:
            assert start >= ends[-1]
            ends.append(start + sizes[index])
        assert ends[-1] <= capacity


def _copied(gpu: EmulatedCuda) -> list[Any]:
    tensors = [
        torch.randn(3, 5, device="cuda"),
        torch.arange(7, device="cuda"),
        torch.tensor(2.5, device="cuda", dtype=torch.bfloat16),
        torch.empty(0, 4, device="cuda"),
        torch.randn(4, 6, device="cuda").t(),
        torch.tensor([True, False, True], device="cuda"),
        torch.randn(2, device="cuda", dtype=torch.complex64),
        torch.nn.Parameter(torch.randn(9, device="cuda")),
    ]
    gpu.forget()
    copies = pinned_copies(tensors)
    blocking = [copy.blocking for copy in gpu.copies]
    torch.cuda.synchronize()
    alike = [
        torch.equal(one.cpu(), copy) and one.dtype == copy.dtype for one, copy in zip(tensors, copies, strict=True)
    ]
    return [alike, blocking, [copy.is_pinned() for copy in copies if copy.numel()]]


@requires_emulated_cuda()
def test_copies_are_equal_and_do_not_block() -> None:  # O-02
    alike, blocking, pinned = on_emulated_cuda(_copied).returned
    assert alike == [True] * 8
    assert blocking == [False] * 7
    assert pinned == [True] * 7
