"""One rank of a simulated world: torch's fake process group, and a store in which all other ranks have answered.

This is the only module that imports torch's fake process group, which is internal to torch's tests.
"""

# Annotations are evaluated here, unlike elsewhere: DDP compares those of a communication hook with classes.
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from drivetrain._distributed.control_group import GroupControl
from drivetrain._distributed.plain_values import encode
from drivetrain_strategies import DDPStrategy


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Make this process the last of ``size`` ranks within the context; collectives return at once and move no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class OthersAnswered:
    """The run's store as the last rank but one sees it, after all others except the one that completes an agreement.

    All other ranks raise the flags that this rank raises, and rank 0 has shared what this rank expects.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[str, bytes] = {}
        self.calls = 0

    def set(self, key: str, value: str | bytes) -> None:
        self.calls += 1
        self._values[key] = value.encode() if isinstance(value, str) else value

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        done = {"total": amount * self._size, "purposes": ["the same"]}
        self._values[f"{key}/done"] = json.dumps(done).encode()
        return amount * (self._size - 1) if self._size > 1 else amount

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        self.calls += 1
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        return [b"the same"] * len(keys)

    def delete_key(self, key: str) -> None:
        self.calls += 1
        self._values.pop(key, None)


class _Control(GroupControl):
    """The control plane of the distributed strategies, on the simulated store."""

    store: Any

    def broadcast_object(self, value: Any) -> Any:
        key = f"shared/{self._shared}"
        # What rank 0 would have stored. The only value that rank 0 alone has is the seed of the order of samples.
        self.store.set(key, encode(0 if value is None else value))
        return super().broadcast_object(value)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.world_size


class FakeDDP(DDPStrategy):
    """`DDPStrategy` in a `fake_world`."""

    def setup_environment(self) -> None:
        size = dist.get_world_size()
        self.control = _Control(dist.group.WORLD, OthersAnswered(size), self.rank, size)  # type: ignore[arg-type]


def keep(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """A communication hook that sends nothing, since DDP cannot use the result of the fake group's all-reduce."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
