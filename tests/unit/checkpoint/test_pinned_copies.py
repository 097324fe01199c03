"""Copies of a device's tensors in pinned memory, for saves in the background."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from drivetrain.checkpoint._format.pinned_copies import blocks, pinned_copies
from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from worlds import on_emulated_cuda


def _sizes(kind: str) -> list[int]:
    draw = random.Random(3)
    layer = [4 * 768 * 768, 4 * 768 * 3072, 4 * 768 * 3072, 4 * 768, 4 * 3072, 4 * 2304 * 768]
    return {
        "a transformer": [4 * 50304 * 768, *(12 * layer)],
        "layers alone": 32 * layer,
        "many small": [64 * draw.randrange(1, 40) for _ in range(5000)],
        "of all sizes": [64 * int(2 ** (draw.random() * 20)) for _ in range(300)],
    }[kind]


@pytest.mark.parametrize("kind", ["a transformer", "layers alone", "many small", "of all sizes"])
def test_little_memory_is_wasted_on_rounding(kind: str) -> None:  # O-02
    sizes = _sizes(kind)
    packed = blocks(sizes)
    assert sum(capacity for capacity, _ in packed) < 1.1 * sum(sizes)
    assert len(packed) <= 24


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 64], [64], [64, 64, 64], [2**20 + 64], [192, 128, 64]])
def test_each_has_bytes_of_its_own(sizes: list[int]) -> None:
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
    ahead = [copy.blocking for copy in gpu.copies]
    torch.cuda.synchronize()
    alike = [
        torch.equal(one.cpu(), copy) and one.dtype == copy.dtype for one, copy in zip(tensors, copies, strict=True)
    ]
    return [alike, ahead, [copy.is_pinned() for copy in copies if copy.numel()]]


@requires_emulated_cuda()
def test_copies_are_equal_and_none_is_waited_for() -> None:  # O-02
    alike, ahead, pinned = on_emulated_cuda(_copied).returned
    assert alike == [True] * 8
    assert ahead == [False] * 7
    assert pinned == [True] * 7
