"""GroupControl: the control plane over a gloo group and its store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from drivetrain._distributed.control_plane import ControlPlane, absent_error, refuse_differences
from drivetrain._distributed.failure import RankFailedError
from drivetrain._distributed.failure_exchange import FailureExchange
from drivetrain._distributed.flight_recorder import FlightRecord
from drivetrain._distributed.plain_values import decode, encode
from drivetrain._distributed.watchdog import request_stacks

_FIELD_BITS = 20  # the bits of one count in the counter of an agreement, enough for a million ranks
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.1  # seconds between two polls of the store
_LEAVE_TIMEOUT = timedelta(seconds=30)  # how long rank 0 keeps hosting the store for the other ranks
_PING = 30.0  # seconds of waiting between two checks that the absent ranks are alive
_FAILURE_CHECK = 1.0  # seconds of waiting between two checks for reported failures


class GroupControl(ControlPlane):
    """The control plane over CPU, on a separate process group, so that its messages never queue behind gradients.

    Args:
        group: a gloo process group over all ranks.
        store: the rendezvous store under this run's prefix.
        rank: this rank.
        world_size: the number of ranks.
        timeout: how long to wait for other ranks in the store.
        on_first_step: a function to call once, after the first step.
    """

    def __init__(
        self,
        group: Any,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta = timedelta(minutes=30),
        on_first_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._group = group
        self.timeout = timeout
        self._on_first_step = on_first_step
        self.store: Store = store
        self.failures: FailureExchange = FailureExchange(store, rank, world_size)
        self.rank = rank
        self.world_size = world_size
        self.flight = FlightRecord(rank)
        self._clones: list[GroupControl] = []
        self._agreements = 0
        self._shared = 0
        self._watches: list[Callable[[Store], None]] = []

    def detach(self) -> None:
        """Drop the process group, which is about to be destroyed, and keep the store for the exchange of failures."""
        self._group = None
        self._watches.clear()
        while self._clones:
            clone = self._clones.pop()
            if dist.is_initialized():
                dist.destroy_process_group(clone._group)
            clone.detach()

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        gathered = values.new_empty((self.world_size, *values.shape))
        dist.all_gather(list(gathered), values.contiguous(), group=self._group)
        return gathered

    def all_reduce_async(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        work: Any = dist.all_reduce(values, group=self._group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return values

        return wait

    def gather_objects(self, value: Any) -> list[Any]:
        return [decode(content) for content in self.gather_bytes(encode(value))]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(content)]))]
        longest = max(sizes)
        if longest == 0:
            return [b""] * self.world_size
        # The tensors share the memory of Python's buffers, so that gloo reads and writes the buffers in place.
        gathered = bytearray(longest * self.world_size)
        parts = torch.frombuffer(gathered, dtype=torch.uint8).view(self.world_size, longest)
        padded = bytearray(longest)
        padded[: len(content)] = content
        dist.all_gather(list(parts), torch.frombuffer(padded, dtype=torch.uint8), group=self._group)
        starts = range(0, len(gathered), longest)
        return [bytes(gathered[start : start + size]) for start, size in zip(starts, sizes, strict=True)]

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        # The group contains all ranks, so a rank within the group equals the global rank.
        work = [dist.isend(tensor, group=self._group, group_dst=rank) for rank, tensor in sends.items()]
        work += [dist.irecv(tensor, group=self._group, group_src=rank) for rank, tensor in receives.items()]
        for request in work:
            assert request is not None  # None only on ranks outside of the group
            request.wait()

    def clone(self) -> GroupControl:
        self.monitored_barrier("a second control plane")  # `new_group` waits for all ranks and does not notice failures
        store = PrefixStore(f"twin{len(self._clones)}", self.store)
        group = dist.new_group(backend="gloo", timeout=self.timeout)
        clone = GroupControl(group, store, self.rank, self.world_size, self.timeout)
        # Failures and stacks are not stored under the clone's prefix of the store.
        clone.failures, clone.collect_stacks = self.failures, self.collect_stacks  # type: ignore[method-assign]
        clone.flight = self.flight
        self._clones.append(clone)
        return clone

    def broadcast_object(self, value: Any) -> Any:
        key = f"shared/{self._shared}"
        self._shared += 1
        if self.rank == 0:
            self.store.set(key, encode(value).decode())
            return value
        self._wait(key, "a value from rank 0", None)
        return decode(self.store.get(key))

    def count_flags(self, purpose: str, *flags: bool, timeout: timedelta | None = None) -> tuple[int, ...]:
        # One counter contains, in separate bit fields, the number of ranks that arrived and the number of ranks that
        # raised each flag. The last rank to arrive publishes the counter, so that all ranks read the same numbers.
        number = self._agreements
        self._agreements += 1
        key = f"agree/{number}"
        contribution = 1
        for position, flag in enumerate(flags, start=1):
            contribution |= int(flag) << (_FIELD_BITS * position)
        self.store.set(f"{key}/{self.rank}", purpose)
        total = self.store.add(key, contribution)
        mask = (1 << _FIELD_BITS) - 1
        if total & mask == self.world_size:
            purposes = [text.decode() for text in self.store.multi_get(self._arrivals(key))]
            self.store.set(f"{key}/done", json.dumps({"total": total, "purposes": list(dict.fromkeys(purposes))}))
        else:
            self._wait(f"{key}/done", purpose, timeout, key)
        done = json.loads(self.store.get(f"{key}/done"))
        if len(done["purposes"]) > 1:
            refuse_differences(
                [{"the next call": text.decode()} for text in self.store.multi_get(self._arrivals(key))],
                "every rank must make the same collective calls in the same order.",
                "look for a call under `if trainer.is_global_zero:` and move it out.",
            )
        self._delete_agreement(number - 2)
        return tuple((done["total"] >> (_FIELD_BITS * position)) & mask for position in range(1, len(flags) + 1))

    def watch(self, poll: Callable[[Store], None]) -> None:
        self._watches.append(poll)

    def poll(self, store: Store) -> None:
        """Call the functions given to `watch`. Called by the watchdog."""
        for poll in self._watches:
            poll(store)

    def wait_for(self, key: str, purpose: str) -> None:
        self._wait(f"{key}/done", purpose, None, key)

    def _arrivals(self, key: str) -> list[str]:
        return [f"{key}/{rank}" for rank in range(self.world_size)]

    def _wait(self, key: str, purpose: str, timeout: timedelta | None, agreement: str | None = None) -> None:
        timeout = self.timeout if timeout is None else timeout
        # The store is polled, because a `Store.wait` that times out writes two warnings to the terminal every time.
        start = time.monotonic()
        deadline = start + timeout.total_seconds()
        next_check, next_ping = start + _FAILURE_CHECK, start + _PING
        silent: set[int] = set()
        while not self.store.check([key]):
            waited = time.monotonic() - start
            time.sleep(min(max(waited / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE))
            if time.monotonic() < next_check:
                continue
            next_check += _FAILURE_CHECK
            failure = self.failures.first()
            if failure is not None:
                raise RankFailedError(failure)
            if time.monotonic() > min(deadline, next_ping):
                # The keys are built only here, because building them for every agreement would be slow with many ranks.
                arrivals = [] if agreement is None else self._arrivals(agreement)
                absent = [rank for rank, arrival in enumerate(arrivals) if not self.store.check([arrival])] or [0]
                late = time.monotonic() > deadline
                stacks_by_rank = self.collect_stacks(absent, late)
                # A live rank always answers. A rank that did not answer two requests in a row is gone.
                gone = silent & {rank for rank, stack in stacks_by_rank.items() if stack is None}
                silent = {rank for rank, stack in stacks_by_rank.items() if stack is None}
                next_ping = time.monotonic() + _PING
                if not (late or gone) or self.store.check([key]):
                    continue
                waited = time.monotonic() - start
                raise absent_error(
                    f"Rank {self.rank} reached {purpose} and waited {waited:.0f} s for rank(s) {absent}.",
                    "every rank must make the same collective calls in the same order.",
                    "look for a call under `if trainer.is_global_zero:` and move it out; if a rank is only slow, "
                    "raise the strategy's timeout or step_timeout.",
                    stacks_by_rank,
                    self.flight.pattern,
                )

    def collect_stacks(self, ranks: Sequence[int] | None = None, late: bool = False) -> dict[int, str | None]:
        answers = request_stacks(self.store, self.rank, self.world_size, late)
        if late:
            self.flight.write()
        requested = [rank for rank in range(self.world_size) if rank != self.rank] if ranks is None else ranks
        return {rank: answers.get(rank) for rank in requested}

    def set_record_folder(self, folder: str | None) -> None:
        self.flight.folder = folder

    def records(self) -> str | None:
        return self.flight.pattern

    def after_first_step(self) -> None:
        self._on_first_step()

    def _delete_agreement(self, number: int) -> None:
        # All ranks have reached agreement `number + 1`, so no rank reads the keys of agreement `number` any more.
        if number < 0:
            return
        self.store.delete_key(f"agree/{number}/{self.rank}")
        if self.rank == 0:
            self.store.delete_key(f"agree/{number}")
            self.store.delete_key(f"agree/{number}/done")

    def leave(self) -> None:
        self.monitored_barrier("the end of the run")
        if self.store.add("left", 1) == self.world_size:
            self.store.set("all left", "")
        elif self.rank == 0:
            self.store.wait(["all left"], _LEAVE_TIMEOUT)
