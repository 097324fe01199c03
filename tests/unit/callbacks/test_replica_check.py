from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from callback_run import FakeRun, distributed_run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from drivetrain._distributed.checksum import checksum, checksums
from drivetrain.callbacks import ReplicaCheck
from drivetrain.errors import ConfigurationError, DistributedError
from worlds import on_ranks

_DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_one_bit_anywhere_changes_the_checksum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
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


def test_what_compensates_in_a_plain_sum_shows() -> None:
    value = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert checksum(value.flip(0)) != checksum(value)
    # Two signs are flipped in opposite directions, so a sum of the values as integers does not change.
    assert checksum(torch.tensor([-1.0, 1.0])) != checksum(torch.tensor([1.0, -1.0]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_layouts_and_sizes_do_not_matter_but_values_do() -> None:
    value = torch.arange(12.0).reshape(3, 4)
    assert checksum(value.t()) == checksum(value.t().contiguous())
    assert checksum(value[:, ::2]) == checksum(value[:, ::2].contiguous())
    assert checksum(torch.eye(3).to_sparse()) == checksum(torch.eye(3))
    assert checksum(torch.zeros(0)) == 0
    assert checksum(torch.ones(3, device="meta")) == 0
    assert checksum(torch.tensor(True)) != checksum(torch.tensor(False))
    large = torch.arange((1 << 22) + 5)
    late = large.clone()
    late[-1] += 1
    assert checksum(large) != checksum(late)
    assert checksums([value, large]).tolist() == [int(checksum(value)), int(checksum(large))]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(4))


def _check(callback: ReplicaCheck, run: Any, net: Any, step: int) -> str:
    run.global_step = step
    try:
        callback.on_train_batch_end(run, net, {}, None, step)
    except DistributedError as error:
        return error.what
    return ""


def _drift(tensor: str, ranks: list[int]) -> list[str]:
    run: Any = distributed_run()
    rank = run.strategy.control.rank
    torch.manual_seed(0)
    net: Any = _Net()
    found = []
    callback = ReplicaCheck(every_n_steps=2)
    callback.on_train_start(run, net)
    # Allowed: statistics of each rank until the next forward broadcasts rank 0's.
    net.norm.running_mean.add_(rank)
    found.append(_check(callback, run, net, 2))
    if rank in ranks:
        with torch.no_grad():
            value = net.get_parameter(tensor) if "." in tensor else net.get_buffer(tensor)
            value.view(-1)[1] = torch.nextafter(value.view(-1)[1], torch.tensor(9.0))  # the last bit
    found.append(_check(callback, run, net, 3))  # no check is due at this step
    found.append(_check(callback, run, net, 4))
    return found


def test_the_first_that_differs_is_named_with_the_ranks_on_every_rank() -> None:
    # C-04, B-20
    for results in (on_ranks(_drift, 3, "last.weight", [1]),):
        assert results[0] == results[1] == results[2]
        early, skipped, found = results[0]
        assert (early, skipped) == ("", "")
        assert found == (
            "The replicas differ after step 4: parameter 'last.weight' is not the same on ranks 0, 2 and on rank 1"
        )
    found = on_ranks(_drift, 2, "scale", [0])[1][-1]
    assert "buffer 'scale' is not the same on rank 0 and on rank 1" in found


def _two_drift() -> tuple[str, str, str]:
    run: Any = distributed_run()
    torch.manual_seed(run.strategy.control.rank)
    net = _Net()
    everything = _check(ReplicaCheck(every_n_steps=1), run, net, 1)
    partly = _check(ReplicaCheck(every_n_steps=1, ignore=["first.*"]), run, net, 1)
    nothing = _check(ReplicaCheck(every_n_steps=1, ignore=["*"]), run, net, 1)
    return everything, partly, nothing


def test_several_are_counted_and_some_can_be_left_out() -> None:
    everything, partly, nothing = on_ranks(_two_drift, 2)[0]
    assert "'first.weight'" in everything
    assert "the first of 4 that differ" in everything
    assert "'last.weight'" in partly
    assert nothing == ""


def _other_names() -> str:
    run: Any = distributed_run()
    net = _Net()
    if run.strategy.control.rank == 1:
        net.register_buffer("extra", torch.zeros(1))
    return _check(ReplicaCheck(every_n_steps=1), run, net, 1)


def test_different_buffers_are_named_instead_of_hanging() -> None:
    for found in on_ranks(_other_names, 2):
        assert "buffer 'extra': missing on rank(s) [0]; \"held after step" in found


def _reentrant_twice(cured: bool) -> list[str]:
    """Checkpoints one module twice with use_reentrant=True under plain DDP (C-03)."""
    run: Any = distributed_run()
    rank = run.strategy.control.rank
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=not cured)
            return x

    net = Twice()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    callback = ReplicaCheck(every_n_steps=1)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 4):
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
            optimizer.zero_grad()
            wrapped(data).square().mean().backward()
            optimizer.step()
            found.append(_check(callback, run, net, step))
    return found


def test_ranks_that_diverge_in_silence_are_caught() -> None:
    # C-03, C-04
    results = on_ranks(_reentrant_twice, 2, False)
    assert results[0] == results[1]
    assert results[0][0].startswith("The replicas differ after step 1: parameter 'block.weight'")
    assert on_ranks(_reentrant_twice, 2, True)[0] == ["", "", ""]


def _max_norm() -> list[str]:
    """Train an embedding with max_norm, which renormalizes the rows that a rank uses on that rank only (B-20)."""
    run: Any = distributed_run()
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Embedding(20, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 1))
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    callback = ReplicaCheck()
    callback.on_train_start(run, net)
    for step in range(3):
        rows = torch.tensor([[step, step + 1]]) + 10 * run.strategy.control.rank
        optimizer.zero_grad()
        wrapped(rows).sum().backward()
        optimizer.step()
    found = _check(callback, run, net, 3)  # the default interval is longer than the run
    try:
        callback.on_train_end(run, net)
    except DistributedError as error:
        return [found, error.what]
    return [found]


def test_a_drift_before_the_first_interval_is_found_as_training_ends() -> None:
    # B-20
    found = on_ranks(_max_norm, 2)[1]
    assert found[0] == ""
    assert "after step 3: parameter '0.weight'" in found[1]


def _sharded(broken: bool) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    run: Any = distributed_run()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = nn.Module()
    value = distribute_tensor(torch.arange(16.0).reshape(8, 2), mesh, [Replicate(), Shard(0)])
    net.weight = nn.Parameter(value)
    assert isinstance(net.weight, DTensor)
    if broken and dist.get_rank() == 3:
        with torch.no_grad():
            net.weight.to_local()[0, 0] += 1
    return _check(ReplicaCheck(every_n_steps=1), run, net, 1)


def test_shards_are_compared_between_those_that_hold_the_same() -> None:
    assert on_ranks(_sharded, 4, False) == [""] * 4
    results = on_ranks(_sharded, 4, True)
    assert len(set(results)) == 1
    assert "parameter 'weight' is not the same on rank 1 and on rank 3" in results[0]


def test_one_process_is_always_alike_and_bad_intervals_are_refused() -> None:
    run: Any = FakeRun()
    callback = ReplicaCheck(every_n_steps=1)
    net: Any = _Net()
    callback.on_train_start(run, net)
    assert _check(callback, run, _Net(), 1) == ""
    # G-06
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        ReplicaCheck(every_n_steps=0)
    assert ReplicaCheck().state_key != ReplicaCheck(buffers=False).state_key
