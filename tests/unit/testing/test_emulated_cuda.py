"""O-01: the emulated CUDA reports what a real device may reorder, and computes the host's results."""

from __future__ import annotations

import copy
import linecache
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import ConfigurationError
from drivetrain._distributed.failure import RankFailedError
from drivetrain.testing import run_distributed
from emulated_cuda import EmulatedCuda, emulated_cuda, requires_emulated_cuda
from worlds import DEVICES, on_emulated_cuda

pytestmark = requires_emulated_cuda()

DEVICE = torch.device("cuda")


def quoted(where: tuple[str, ...]) -> str:
    """Return the source text of the innermost line."""
    path, line = where[0].partition(" in ")[0].rsplit(":", 1)
    return linecache.getline(path, int(line)).strip()


# Races


def _side(gpu: EmulatedCuda, order: str) -> None:
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
    elif order == "event of an earlier time":
        with torch.cuda.stream(side):
            y += 1
        torch.cuda.current_stream().wait_event(done)
    elif order == "host":
        side.synchronize()
    elif order == "host by event":
        done.synchronize()
    elif order == "queries":
        while not done.query():
            pass
    y.mul(2)
    y.record_stream(torch.cuda.current_stream())


def test_a_race_is_told_with_both_lines() -> None:
    # O-01
    (race,) = on_emulated_cuda(_side, "nothing").races
    assert race.what == "read after write"
    assert race.size == 16
    assert race.earlier.name == "add"
    assert quoted(race.earlier.where) == "y = x + 1"
    assert race.earlier.stream.startswith("cuda:0/")
    assert race.later is not None
    assert race.later.name == "mul"
    assert quoted(race.later.where) == "y.mul(2)"
    assert race.later.stream == "cuda:0/default"
    assert "unordered read after write of 16 bytes" in str(race)


def test_an_event_orders_what_came_before_it_alone() -> None:
    # O-01
    (race,) = on_emulated_cuda(_side, "event of an earlier time").races
    assert (race.earlier.name, race.what) == ("add_", "read after write")


@pytest.mark.parametrize("order", ["event", "stream", "host", "host by event", "queries"])
def test_what_is_ordered_is_no_race(order: str) -> None:
    # O-01
    assert not on_emulated_cuda(_side, order).races


def _apart(gpu: EmulatedCuda, overlap: bool) -> None:
    side = torch.cuda.Stream()
    buffer = torch.zeros(8, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        buffer[:4].add_(1)
    buffer[3 if overlap else 4 :].add_(1)
    buffer.record_stream(side)


@pytest.mark.parametrize("overlap", [False, True])
def test_writes_to_other_parts_of_the_same_memory_are_no_race(overlap: bool) -> None:
    # O-01
    races = on_emulated_cuda(_apart, overlap).races
    assert [(race.what, race.size) for race in races] == ([("write after write", 4)] if overlap else [])


def _read_twice(gpu: EmulatedCuda, writes: bool) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(4, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    x.mul_(2) if writes else x.mul(2)
    x.record_stream(side)


@pytest.mark.parametrize("writes", [False, True])
def test_reads_do_not_race_and_a_write_after_a_read_does(writes: bool) -> None:
    # O-01
    races = on_emulated_cuda(_read_twice, writes).races
    assert [race.what for race in races] == (["write after read"] if writes else [])


def _backward(gpu: EmulatedCuda, waits: bool) -> None:
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    loss = (weight * 2).sum()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        loss.backward()
        assert weight.grad is not None
        weight.grad.add_(1)
        weight.grad.record_stream(side)
    weight.grad.record_stream(side)


def test_backward_runs_on_the_streams_of_the_forward_and_is_waited_for() -> None:
    # O-01
    assert not on_emulated_cuda(_backward, True).races


def _in_backward(gpu: EmulatedCuda) -> None:
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    factor = torch.full((4,), 2.0, device=DEVICE)
    loss = (weight * factor).sum()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        factor.data.add_(1)
    loss.backward()
    factor.record_stream(side)


def test_a_race_in_backward_names_the_line_that_waits_for_it() -> None:
    # O-01
    (race,) = on_emulated_cuda(_in_backward).races
    assert race.later is not None
    assert race.later.where[0] == "(in backward)"
    assert quoted(race.later.where[1:]) == "loss.backward()"


def _threads(gpu: EmulatedCuda) -> list[int]:
    streams = []

    def work() -> None:
        streams.append(torch.cuda.current_stream().cuda_stream)
        with torch.cuda.device(1):
            streams.append(torch.cuda.current_device())

    with torch.cuda.stream(torch.cuda.Stream()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        streams.append(torch.cuda.current_device())
    return streams


def test_a_thread_has_a_current_stream_and_device_of_its_own() -> None:
    # O-01
    assert on_emulated_cuda(_threads).returned == [0, 1, 0]


# Frees


def _freed(gpu: EmulatedCuda, how: str) -> None:
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    for _ in range(2):
        with torch.cuda.stream(side):
            batch = torch.ones(4, device=DEVICE)
        current.wait_stream(side)
        batch.sum()
        if how == "recorded":
            batch.record_stream(current)
        del batch
        if how == "waited":
            side.wait_stream(current)
    gpu.forget() if how == "none is made after" else None


def test_memory_that_is_freed_while_another_stream_reads_it_is_told() -> None:
    # O-01
    seen = on_emulated_cuda(_freed, "in use")
    (free,) = seen.frees_in_use
    assert free.use.name == "sum"
    assert quoted(free.use.where) == "batch.sum()"
    assert free.use.stream == "cuda:0/default"
    assert free.owner.startswith("cuda:0/")
    assert free.owner != free.use.stream
    assert quoted(free.where) == "del batch"
    assert "16 bytes" in str(free)
    assert not seen.races


@pytest.mark.parametrize("how", ["recorded", "waited"])
def test_memory_that_its_allocator_knows_to_be_in_use_is_safe(how: str) -> None:
    # O-01
    assert not on_emulated_cuda(_freed, how).frees_in_use


# Host synchronization


def _sync(gpu: EmulatedCuda, how: str) -> None:
    x = torch.tensor([0.0, 1.0, 2.0], device=DEVICE)
    mask = x > 0
    gpu.forget()
    {
        "item": lambda: x.sum().item(),
        "float": lambda: float(x.sum()),
        "if": lambda: bool(x.any()),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[mask],
        "equal": lambda: torch.equal(x, x),
        "synchronize": lambda: torch.cuda.synchronize(),
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "nothing": lambda: (x.sum() + x[1] * x.clamp(0, 1)).square_(),
        "put": lambda: x.masked_fill_(mask, 1.0),
    }[how]()


HOST_SYNCS = {
    "item": ["item"],
    "float": ["item"],
    "if": ["item"],
    "nonzero": ["nonzero"],
    "mask": ["index"],
    "equal": ["equal"],
    "synchronize": ["synchronize"],
    "stream": ["Stream.synchronize"],
    "nothing": [],
    "put": [],
}


@pytest.mark.parametrize("how", HOST_SYNCS)
def test_the_host_waits_where_it_needs_a_result(how: str) -> None:
    # O-01
    seen = on_emulated_cuda(_sync, how)
    assert [sync.what for sync in seen.host_syncs] == HOST_SYNCS[how]
    assert all(f'"{how}": lambda: ' in quoted(sync.where) for sync in seen.host_syncs)
    assert not seen.copies


def _warned(gpu: EmulatedCuda) -> str:
    x = torch.ones(1, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    x.add_(1)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        x.item()
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="synchronizing CUDA operation"):
        x.cpu()
    return str(torch.cuda.get_sync_debug_mode())


def test_torchs_own_way_of_finding_host_syncs_works() -> None:
    # O-01
    assert on_emulated_cuda(_warned).returned == "1"


def _copied(gpu: EmulatedCuda, how: str) -> None:
    pinned = torch.ones(4, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not torch.ones(4).is_pinned()
    gpu.forget()
    {
        "pinned, asked for": lambda: pinned.to(DEVICE, non_blocking=True),
        "a part of pinned memory": lambda: pinned[1:3].to(DEVICE, non_blocking=True),
        "pinned, not asked for": lambda: pinned.to(DEVICE),
        "pageable, asked for": lambda: torch.ones(4).to(DEVICE, non_blocking=True),
        "pinned, of another dtype": lambda: torch.empty(4, device=DEVICE, dtype=torch.double).copy_(pinned, True),
        "pinned, every second one": lambda: pinned[::2].to(DEVICE, non_blocking=True),
        "a number": lambda: torch.tensor(1.0, device=DEVICE),
    }[how]()


COPIES = {
    "pinned, asked for": False,
    "a part of pinned memory": False,
    "pinned, not asked for": True,
    "pageable, asked for": True,
    "pinned, of another dtype": True,
    "pinned, every second one": True,
    "a number": True,
}


@pytest.mark.parametrize("how", COPIES)
def test_the_host_waits_for_copies_that_are_not_from_pinned_memory(how: str) -> None:
    # O-01
    seen = on_emulated_cuda(_copied, how)
    (copy,) = seen.copies
    assert copy.blocking == COPIES[how]
    assert bool(seen.blocking_copies) == COPIES[how]
    assert copy.direction == "to the device"
    assert copy.pinned == ("pinned" in how)
    assert f'"{how}"' in quoted(copy.where)
    assert not seen.host_syncs


def _indexed(gpu: EmulatedCuda) -> None:
    x = torch.ones(4, device=DEVICE)
    there = torch.tensor([0, 2], device=DEVICE)
    gpu.forget()
    x[there] = 2.0 * x[there]
    x[torch.tensor([0, 2])]


def test_an_index_of_the_hosts_is_a_copy_that_blocks() -> None:
    # O-01
    seen = on_emulated_cuda(_indexed)
    (copy,) = seen.blocking_copies
    assert quoted(copy.where) == "x[torch.tensor([0, 2])]"
    assert copy.size == 16
    assert not seen.host_syncs


def _brought_back(gpu: EmulatedCuda) -> list[bool]:
    x = torch.ones(4, device=DEVICE)
    kept = torch.zeros(4, pin_memory=True)
    kept.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    found = [bool(kept.isnan().all()), event.query(), bool(kept.isnan().all())]
    return [*found, event.query(), torch.equal(kept, torch.ones(4))]


def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited_for_it() -> None:
    # O-01
    assert on_emulated_cuda(_brought_back).returned == [True, False, True, True, True]


def _brought_back_and_sent_again(gpu: EmulatedCuda) -> Tensor:
    x = torch.arange(4.0, device=DEVICE)
    kept = x.to("cpu", non_blocking=True)
    return kept.to(DEVICE, non_blocking=True).mul(2).cpu()


def test_what_a_stream_has_put_into_pinned_memory_it_finds_there() -> None:
    # O-01
    seen = on_emulated_cuda(_brought_back_and_sent_again)
    assert torch.equal(seen.returned, torch.arange(4.0) * 2)
    assert [copy.blocking for copy in seen.copies] == [False, False, True]
    assert not seen.races


def _overwritten(gpu: EmulatedCuda, waits: bool) -> None:
    pinned = torch.ones(4, pin_memory=True)
    pinned.to(DEVICE, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    pinned.zero_()
    torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_that_the_host_changes_under_a_copy_is_a_race(waits: bool) -> None:
    # O-01
    races = on_emulated_cuda(_overwritten, waits).races
    assert len(races) == (not waits)
    assert all(race.later is None and "changed by the host" in str(race) for race in races)


def _reported(gpu: EmulatedCuda) -> list[int]:
    x = torch.ones(2, device=DEVICE)
    for _ in range(3):
        x.sum().item()
    counts = [len(gpu.host_syncs)]
    gpu.forget()
    return [*counts, len(gpu.host_syncs), len(gpu.copies)]


def test_what_was_seen_is_told_once_with_its_count_and_can_be_forgotten() -> None:
    # O-01
    seen = on_emulated_cuda(_reported)
    assert seen.returned == [3, 0, 0]
    assert seen.report.count("none") == 4
    three = on_emulated_cuda(_synced_thrice)
    assert "3 times: the host waited for cuda:0: item" in three.report


def _synced_thrice(gpu: EmulatedCuda) -> None:
    x = torch.ones((), device=DEVICE)
    for _ in range(3):
        x.item()


# Numbers


def _trained(device: str, optimizer: str) -> list[Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv1d(2, 8, 3), nn.GELU(), nn.Flatten(), nn.LayerNorm(48), nn.Linear(48, 3)).to(device)
    steps: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "foreach": lambda: torch.optim.AdamW(net.parameters(), 1e-2, foreach=True),
        "fused": lambda: torch.optim.AdamW(net.parameters(), 1e-2, fused=True),
        "sgd": lambda: torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9, foreach=True),
    }
    stepper = steps[optimizer]()
    x, y = torch.randn(5, 2, 8).to(device), torch.tensor([0, 1, 2, 0, 1]).to(device)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(net(x), y)
        stepper.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        stepper.step()
        losses.append(loss.detach())
    return [*(value.detach().cpu() for value in net.parameters()), torch.stack(losses).cpu()]


def _both(gpu: EmulatedCuda, optimizer: str) -> bool:
    there = _trained("cuda:1", optimizer)
    return all(torch.equal(one, other) for one, other in zip(there, _trained("cpu", optimizer), strict=True))


@pytest.mark.parametrize("optimizer", ["foreach", "fused", "sgd"])
def test_training_gives_the_cpus_numbers_to_the_last_bit(optimizer: str) -> None:
    # O-01
    seen = on_emulated_cuda(_both, optimizer)
    assert seen.returned
    assert not seen.races
    assert not seen.frees_in_use
    assert not seen.host_syncs


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(2, 2, 3).transpose(0, 2).reshape(-1),
    "unfold": lambda x: x.unfold(1, 2, 1) + 1,
    "unfold a view": lambda x: x[1:].unfold(1, 2, 1).clone(),
    "expand": lambda x: x.sum(0).expand(4, 3).contiguous(),
    "index": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "index with the host's": lambda x: x[torch.tensor([2, 0])],
    "mask": lambda x: x[x > 0],
    "put": lambda x: x.clone().index_put_((torch.tensor([1], device=x.device),), torch.tensor(7.0, device=x.device)),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "out cat": lambda x: torch.cat([x, x], out=x.new_empty(0)),
    "complex": lambda x: torch.view_as_complex(x[:, :2].contiguous()).conj() * 2,
    "real": lambda x: torch.view_as_real(torch.complex(x, x)),
    "sort": lambda x: x.sort(1),
    "unique": lambda x: x.round().unique(return_inverse=True),
    "linalg": lambda x: torch.linalg.svdvals(x),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "half": lambda x: (x.half() @ x.half().T).float(),
    "resize": lambda x: x.clone().resize_(2, 2),
    "storage": lambda x: torch.empty(0, device=x.device).set_(x.untyped_storage(), 3, (3,), (1,)),
    "share": lambda x: torch.empty(0, device=x.device).set_(x),  # type: ignore[call-overload]
    "attention": lambda x: nn.functional.scaled_dot_product_attention(*[x.reshape(1, 2, 2, 3)] * 3).round(decimals=5),  # type: ignore[arg-type]
    "norms": lambda x: torch._foreach_norm([x, x + 1]),
    "added": lambda x: torch._foreach_add([x, x], 1.0),
    "scalar": lambda x: x + torch.tensor(2.0),
    "one hot": lambda x: nn.functional.one_hot(x.argmax(1), 3),
    "embedding": lambda x: nn.functional.embedding(torch.tensor([[1, 2]], device=x.device), x),
    "arange": lambda x: torch.arange(5, device=x.device) + torch.eye(5, device=x.device),
    "to": lambda x: x.to(torch.bfloat16).double(),
    "text": str,
    "deep copy": copy.deepcopy,
    "conv": lambda x: nn.functional.conv1d(x[None], x[None, :, :2].expand(2, 4, 2)),
    "list": lambda x: x.tolist(),
    "triangle": lambda x: torch.tril_indices(3, 3, device=x.device),
    "empty": lambda x: x[:0].sum(0),
}


def _operators(gpu: EmulatedCuda) -> list[str]:
    wrong = []
    given = torch.linspace(-2, 3, 12).reshape(4, 3)
    for name, operator in OPERATORS.items():
        here, there = operator(given), operator(given.to("cuda:1"))
        if isinstance(here, str):
            there = there.replace(", device='cuda:1'", "")
        if not _same(here, there):
            wrong.append(f"{name}: {there} for {here}")
    return wrong


def _same(here: Any, there: Any) -> bool:
    if isinstance(here, Tensor):
        assert there.is_cuda
        return torch.equal(here, there.cpu())
    if isinstance(here, tuple | list):
        return len(here) == len(there) and all(map(_same, here, there))
    return bool(here == there)


def test_operators_give_the_cpus_results() -> None:
    # O-01
    seen = on_emulated_cuda(_operators)
    assert seen.returned == []
    assert not seen.races


def _lacking(gpu: EmulatedCuda) -> None:
    nn.LSTM(4, 4, device=DEVICE)(torch.ones(1, 4, device=DEVICE))


def test_an_operator_that_the_host_lacks_is_named() -> None:
    # O-01
    with pytest.raises(RankFailedError, match="emulation of CUDA has no aten::_thnn_fused_lstm_cell"):
        on_emulated_cuda(_lacking)


def _autocast(gpu: EmulatedCuda) -> list[Any]:
    layer = nn.Linear(4, 4, device=DEVICE)
    with torch.autocast("cuda", torch.float16):
        out = layer(torch.ones(2, 4, device=DEVICE))
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler.scale(out.float().sum()).backward()
    scaler.unscale_(optimizer)
    before = layer.bias.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    return [out.dtype, scaler.get_scale(), (before - layer.bias.detach()).cpu()]


def test_autocast_and_the_gradient_scaler_work() -> None:
    # O-01
    dtype, scale, change = on_emulated_cuda(_autocast).returned
    assert dtype == torch.float16
    assert scale == 1024.0
    torch.testing.assert_close(change, torch.full((4,), 0.2))


# Devices


def _two_devices(gpu: EmulatedCuda) -> list[Any]:
    x, y = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        x + y
    with pytest.raises(RuntimeError, match=r"same device.*cpu"):
        x + torch.ones(2)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device=f"cuda:{DEVICES}")
    with torch.cuda.device(1):
        made = torch.zeros(1, device="cuda").device
    side = torch.cuda.Stream(1)
    with side:
        inside = torch.cuda.current_device(), torch.cuda.current_stream() == side
        y.add_(1)
    crossed = x.to("cuda:1") + 1
    return [made, inside, torch.cuda.current_device(), torch.cuda.device_count(), crossed.device]


def test_devices_are_apart() -> None:
    # O-01
    seen = on_emulated_cuda(_two_devices)
    assert seen.returned == [torch.device("cuda:1"), (1, True), 0, DEVICES, torch.device("cuda:1")]
    # `y` was made on device 1's default stream, and the other stream did not wait for that.
    assert [race.earlier.name for race in seen.races] == ["fill_"]


def _drawn(gpu: EmulatedCuda) -> dict[str, Tensor]:
    devices = [torch.device("cuda", index) for index in range(DEVICES)]
    found = {}
    torch.manual_seed(3)
    found["host"] = torch.rand(4)
    found["first"] = torch.stack([torch.rand(4, device=device).cpu() for device in devices])
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state(1)
    found["again"] = torch.stack([torch.rand(4, device=device).cpu() for device in devices])
    found["further"] = torch.rand(4, device=devices[1]).cpu()
    torch.cuda.set_rng_state(state, 1)
    found["restored"] = torch.rand(4, device=devices[1]).cpu()
    given = torch.Generator(devices[1]).manual_seed(3)
    found["given"] = torch.rand(4, device=devices[1], generator=given).cpu()
    found["state"] = state
    return found


def test_each_device_draws_from_a_generator_of_its_own() -> None:
    # O-01
    found = on_emulated_cuda(_drawn).returned
    assert torch.equal(found["first"], found["again"])
    assert not torch.equal(found["first"][0], found["host"])
    assert not torch.equal(found["further"], found["again"][1])
    assert torch.equal(found["restored"], found["again"][1])
    assert torch.equal(found["given"], found["again"][1])
    assert found["state"].numel() == 16  # as of a real device


def _dropped(gpu: EmulatedCuda) -> list[bool]:
    x = torch.ones(64, device=DEVICE)
    before = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    one, other = nn.functional.dropout(x, 0.5), nn.functional.dropout(x, 0.5)
    torch.cuda.manual_seed(5)
    again = nn.functional.dropout(x, 0.5)
    return [torch.equal(one, again), not torch.equal(one, other), torch.equal(before, torch.get_rng_state())]


def test_dropout_leaves_the_hosts_generator_alone() -> None:
    # O-01
    assert all(on_emulated_cuda(_dropped).returned)


def _memory(gpu: EmulatedCuda) -> list[int]:
    before = torch.cuda.memory_allocated(1)
    x = torch.empty(1000, device="cuda:1")
    held = torch.cuda.memory_allocated(1) - before
    x.untyped_storage().resize_(0)
    freed = torch.cuda.memory_allocated(1) - before
    torch.cuda.reset_peak_memory_stats(1)
    del x
    return [held, freed, torch.cuda.max_memory_allocated(1) - before, torch.cuda.memory_allocated(0)]


def test_memory_is_counted() -> None:
    # O-01
    assert on_emulated_cuda(_memory).returned == [4000, 0, 0, 0]


# Tests that turn the emulation on and off change their process, so `alone` runs each in its own.


def _switched() -> list[Any]:
    before = [torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.Stream]
    found = []
    for count in (2, 1):
        with emulated_cuda(count, name="A device", memory=4096) as gpu:
            found.append([torch.cuda.is_initialized(), torch.cuda.device_count(), torch.cuda.is_available()])
            torch.cuda.init()
            found.append([torch.cuda.is_initialized(), torch.cuda.get_device_name(), torch.cuda.mem_get_info()])
            kept = torch.ones(1, device="cuda")
            with pytest.raises(ConfigurationError, match=r"within emulated_cuda\(\)"), emulated_cuda():
                pass
            kept.item()
        found.append([len(gpu.host_syncs), len(gpu.races)])
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="emulation of CUDA is off"):
        kept + 1
    after = [torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.Stream]
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    return [before == after, layer.weight.grad is not None, *found]


def _after_a_backward() -> str:
    torch.ones((), requires_grad=True).mul(2).backward()
    with emulated_cuda(3), pytest.raises(ConfigurationError) as refused:
        torch.ones(1, device="cuda")
    return str(refused.value)


def _out_of_memory() -> int:
    with emulated_cuda(memory=4096, enforce_memory=True):
        x = torch.empty(512, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(1024, device="cuda")
        del x
        return torch.empty(1024, device="cuda").numel()


def _visible(named: str) -> list[int]:
    os.environ["CUDA_VISIBLE_DEVICES"] = named
    with emulated_cuda(4) as gpu:
        return [gpu.devices, torch.cuda.device_count(), int(torch.cuda.is_available())]


@pytest.mark.parametrize(("named", "count"), [("1,3", 2), ("2, 0", 2), ("0,9,1", 1), ("", 0), ("1,1", 1)])
def test_the_visible_devices_alone_are_there(named: str, count: int) -> None:
    # O-01
    assert run_distributed(_visible, 1, named, process_group=None, timeout=160.0) == [[count, count, int(count > 0)]]


def _forked(asked: bool) -> int:
    with emulated_cuda(2):
        if asked:
            torch.cuda.is_available()
        child = os.fork()
        if child == 0:
            try:
                # No backward pass: its threads would need torch's thread pool, which does not survive a fork.
                torch.ones(2, device="cuda:1").sum().item()
            except RuntimeError as error:
                os._exit(7 if "Cannot re-initialize CUDA in forked subprocess" in str(error) else 1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("asked", [False, True])
def test_a_forked_process_has_devices_unless_the_driver_was_asked_before(asked: bool) -> None:
    # O-01
    assert run_distributed(_forked, 1, asked, process_group=None, timeout=160.0) == [7 if asked else 0]


def test_outside_of_with_there_is_no_cuda() -> None:
    # O-01
    (found,) = run_distributed(_switched, 1, process_group=None, timeout=160.0)
    assert found[:2] == [True, True]
    for count, part in ((2, found[2:5]), (1, found[5:8])):
        assert part == [[False, count, True], [True, "A device", (4096, 4096)], [1, 0]]


def test_too_few_threads_of_autograds_are_refused() -> None:
    # O-01
    (said,) = run_distributed(_after_a_backward, 1, process_group=None, timeout=160.0)
    assert "devices=3" in said
    assert "run_distributed" in said


def test_a_device_can_be_full() -> None:
    # O-01
    assert run_distributed(_out_of_memory, 1, process_group=None, timeout=160.0) == [1024]


@pytest.mark.parametrize("devices", [0, -1, 65, "2", 1.0, True])
def test_what_is_no_number_of_devices_is_refused(devices: Any) -> None:
    # O-01
    with pytest.raises(ConfigurationError, match=r"use emulated_cuda\(devices=2\)"), emulated_cuda(devices):
        pass
