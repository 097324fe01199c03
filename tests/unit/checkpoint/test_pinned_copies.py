"""Copies of a device's tensors in pinned memory, for saves in the background."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.checkpoint._format.pinned_copies import pinned_copies
from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from worlds import on_emulated_cuda


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
