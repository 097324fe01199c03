"""O-01: the emulated CUDA reports what a real device may reorder, and where the host waits."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from worlds import on_emulated_cuda

pytestmark = requires_emulated_cuda()

DEVICE = torch.device("cuda")


def source_line(where: tuple[str, ...]) -> str:
    path, line = where[0].partition(" in ")[0].rsplit(":", 1)
    return linecache.getline(path, int(line)).strip()


def _add_on_a_side_stream(gpu: EmulatedCuda, order: str) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(4, device=DEVICE)
    torch.cuda.synchronize()
    gpu.forget()
    with torch.cuda.stream(side):
        y = x + 1
        done = side.record_event()
    if order == "event":
        torch.cuda.current_stream().wait_event(done)
    elif order == "stream":
        torch.cuda.current_stream().wait_stream(side)
    elif order == "earlier event":
        with torch.cuda.stream(side):
            y += 1
        torch.cuda.current_stream().wait_event(done)
    elif order == "host":
        side.synchronize()
    elif order == "queries":
        while not done.query():
            pass
    y.mul(2)
    y.record_stream(torch.cuda.current_stream())


def test_operations_race_unless_they_are_ordered_and_both_lines_are_reported() -> None:  # O-01
    (race,) = on_emulated_cuda(_add_on_a_side_stream, "none").races
    assert race.later is not None
    assert (race.what, race.size) == ("read after write", 16)
    assert (race.earlier.name, race.later.name) == ("add", "mul")
    assert (source_line(race.earlier.where), source_line(race.later.where)) == ("y = x + 1", "y.mul(2)")
    assert race.earlier.stream.startswith("cuda:0/")
    assert race.later.stream == "cuda:0/default"
    assert "unordered read after write of 16 bytes" in str(race)
    (race,) = on_emulated_cuda(_add_on_a_side_stream, "earlier event").races
    assert (race.earlier.name, race.what) == ("add_", "read after write")
    for order in ("event", "stream", "host", "queries"):
        assert not on_emulated_cuda(_add_on_a_side_stream, order).races


def _write_parts(gpu: EmulatedCuda, start: int) -> None:
    side = torch.cuda.Stream()
    buffer = torch.zeros(8, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        buffer[:4].add_(1)
    buffer[start:].add_(1)
    buffer.record_stream(side)


def _read_and_then(gpu: EmulatedCuda, operation: str) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(4, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    getattr(x, operation)(2)
    x.record_stream(side)


def _overwrite_pinned_memory(gpu: EmulatedCuda, waits: bool) -> None:
    pinned = torch.ones(4, pin_memory=True)
    pinned.to(DEVICE, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    pinned.zero_()
    torch.cuda.synchronize()


def test_memory_that_both_streams_use_or_the_host_changes_races_if_one_of_them_writes() -> None:
    def races(work: Callable[..., None], argument: Any) -> list[Any]:
        return [(race.what, race.size) for race in on_emulated_cuda(work, argument).races]

    assert races(_write_parts, 4) == []  # other parts of a buffer
    assert races(_write_parts, 3) == [("write after write", 4)]
    assert races(_read_and_then, "mul") == []  # two reads
    assert races(_read_and_then, "mul_") == [("write after read", 16)]
    assert races(_overwrite_pinned_memory, True) == []  # the host waits for its copy
    (race,) = on_emulated_cuda(_overwrite_pinned_memory, False).races
    assert race.later is None
    assert "changed by the host" in str(race)


def _free_in_use(gpu: EmulatedCuda, order: str) -> None:
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    for _ in range(2):
        with torch.cuda.stream(side):
            batch = torch.ones(4, device=DEVICE)
        current.wait_stream(side)
        batch.sum()
        if order == "recorded":
            batch.record_stream(current)
        del batch
        if order == "waited":
            side.wait_stream(current)


def test_memory_freed_while_another_stream_reads_it_is_reported() -> None:
    seen = on_emulated_cuda(_free_in_use, "none")
    (free,) = seen.frees_in_use
    assert (free.use.name, free.use.stream) == ("sum", "cuda:0/default")
    assert (source_line(free.use.where), source_line(free.where)) == ("batch.sum()", "del batch")
    assert free.owner.startswith("cuda:0/")
    assert free.owner != free.use.stream
    assert "16 bytes" in str(free)
    assert not seen.races
    for order in ("recorded", "waited"):  # the allocator knows that the memory is in use
        assert not on_emulated_cuda(_free_in_use, order).frees_in_use


HOST_SYNCS: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str]]] = {
    "item": (lambda x, mask: x.sum().item(), ["item"]),
    "if": (lambda x, mask: bool(x.any()), ["item"]),
    "nonzero": (lambda x, mask: x.nonzero(), ["nonzero"]),
    "mask": (lambda x, mask: x[mask], ["index"]),
    "equal": (lambda x, mask: torch.equal(x, x), ["equal"]),
    "synchronize": (lambda x, mask: torch.cuda.synchronize(), ["synchronize"]),
    "stream": (lambda x, mask: torch.cuda.current_stream().synchronize(), ["Stream.synchronize"]),
    "nothing": (lambda x, mask: (x.sum() + x[1] * x.clamp(0, 1)).square_(), []),
    "put": (lambda x, mask: x.masked_fill_(mask, 1.0), []),
}


def _synchronize(gpu: EmulatedCuda, how: str) -> None:
    x = torch.tensor([0.0, 1.0, 2.0], device=DEVICE)
    mask = x > 0
    gpu.forget()
    HOST_SYNCS[how][0](x, mask)


@pytest.mark.parametrize("how", HOST_SYNCS)
def test_the_host_waits_where_it_needs_a_result(how: str) -> None:
    seen = on_emulated_cuda(_synchronize, how)
    assert [sync.what for sync in seen.host_syncs] == HOST_SYNCS[how][1]
    assert all(f'"{how}": ' in source_line(sync.where) for sync in seen.host_syncs)
    assert not seen.copies


COPIES: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "pinned, asked for": (lambda pinned, x: pinned.to(DEVICE, non_blocking=True), False),
    "a part of pinned memory": (lambda pinned, x: pinned[1:3].to(DEVICE, non_blocking=True), False),
    "pinned, not asked for": (lambda pinned, x: pinned.to(DEVICE), True),
    "pageable, asked for": (lambda pinned, x: torch.ones(4).to(DEVICE, non_blocking=True), True),
    "pinned, of another dtype": (lambda pinned, x: x.copy_(pinned, True), True),
    "pinned, every second one": (lambda pinned, x: pinned[::2].to(DEVICE, non_blocking=True), True),
    "a number": (lambda pinned, x: torch.tensor(1.0, device=DEVICE), True),
    "an index on the host": (lambda pinned, x: x[torch.tensor([0, 2])], True),
}


def _copy(gpu: EmulatedCuda, how: str) -> list[bool]:
    pinned = torch.ones(4, pin_memory=True)
    x = torch.ones(4, device=DEVICE, dtype=torch.double)
    gpu.forget()
    COPIES[how][0](pinned, x)
    return [pinned.is_pinned(), pinned[1:].is_pinned(), torch.ones(4).is_pinned()]


@pytest.mark.parametrize("how", COPIES)
def test_the_host_waits_for_copies_that_are_not_from_pinned_memory(how: str) -> None:
    seen = on_emulated_cuda(_copy, how)
    assert seen.returned == [True, True, False]
    (copy,) = seen.copies
    assert copy.blocking == bool(seen.blocking_copies) == COPIES[how][1]
    assert (copy.direction, copy.pinned) == ("to the device", "pinned" in how)
    assert f'"{how}"' in source_line(copy.where)
    assert not seen.host_syncs
