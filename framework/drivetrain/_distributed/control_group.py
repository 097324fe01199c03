"""The control plane over a gloo group and its store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from drivetrain._distributed.control_plane import Pending, absent_error, spread
from drivetrain._distributed.failure import Failure, RankFailedError, first_cause
from drivetrain._distributed.flight_recorder import FlightRecord
from drivetrain._distributed.plain_values import decode, encode
from drivetrain._distributed.watchdog import stacks
from drivetrain.errors import DistributedError

_FIELD = 20  # bits an agreement spends on one count: up to a million ranks
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.1  # seconds between two looks at the store
_PART = timedelta(seconds=30)  # how long rank 0 waits for the others to have read what it hosts
_PING = 30.0  # seconds of waiting between two looks at whether those it waits for are alive
_LOOK_FOR_FAILURES = 1.0  # seconds of waiting between two looks at whether a rank has failed


class _Reduction:
    """An all-reduce on its way."""

    def __init__(self, values: torch.Tensor, work: Any) -> None:
        self._values = values
        self._work = work

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._values


class GroupControl:
    """Talk between ranks over CPU, on a group of its own, so that it never queues behind gradients.

    Args:
        group: a gloo process group over all ranks.
        store: the run's own corner of the rendezvous store.
        rank: this rank.
        world_size: among how many.
        timeout: how long it waits for the others in the store.
        then: called once, after the first step.
    """

    def __init__(
        self,
        group: Any,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta = timedelta(minutes=30),
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._group = group
        self.timeout = timeout
        self._then = then
        self.external_failures: Callable[[], Sequence[Failure]] = lambda: ()
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.flight = FlightRecord(rank)
        self._clones: list[GroupControl] = []
        self.failed = False
        self._agreements = 0
        self._shared = 0

    def detach(self) -> None:
        """Let go of the group, which is about to be destroyed. The store stays: a failure is settled through it."""
        self._group = None
        while self._clones:
            clone = self._clones.pop()
            if dist.is_initialized():
                dist.destroy_process_group(clone._group)
            clone.detach()

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        gathered = values.new_empty((self.world_size, *values.shape))
        dist.all_gather(list(gathered), values.contiguous(), group=self._group)
        return gathered

    def all_reduce_async(self, values: torch.Tensor) -> Pending:
        return _Reduction(values, dist.all_reduce(values, group=self._group, async_op=True))

    def gather_objects(self, value: Any) -> list[Any]:
        return [decode(content) for content in self.gather_bytes(encode(value))]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(content)]))]
        longest = max(sizes)
        if longest == 0:
            return [b""] * self.world_size
        # Tensors over memory of Python's: gloo reads and writes it where it is.
        gathered = bytearray(longest * self.world_size)
        parts = torch.frombuffer(gathered, dtype=torch.uint8).view(self.world_size, longest)
        mine = bytearray(longest)
        mine[: len(content)] = content
        dist.all_gather(list(parts), torch.frombuffer(mine, dtype=torch.uint8), group=self._group)
        begins = range(0, len(gathered), longest)
        return [bytes(gathered[begin : begin + size]) for begin, size in zip(begins, sizes, strict=True)]

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        # Ranks count within the group, which is a plain one over all of them.
        work = [dist.isend(tensor, group=self._group, group_dst=rank) for rank, tensor in sends.items()]
        work += [dist.irecv(tensor, group=self._group, group_src=rank) for rank, tensor in receives.items()]
        for one in work:
            assert one is not None  # it is for ranks outside of the group
            one.wait()

    def clone(self) -> GroupControl:
        self.agree("a second control plane")  # making a group waits for all, and hears of no failure
        store = PrefixStore(f"twin{len(self._clones)}", self.store)
        group = dist.new_group(backend="gloo", timeout=self.timeout)
        clone = GroupControl(group, store, self.rank, self.world_size, self.timeout)
        # Its own corner of the store knows neither of failures nor of where ranks are.
        clone.external_failures, clone.whereabouts = self._reports, self.whereabouts  # type: ignore[method-assign]
        clone.flight = self.flight
        self._clones.append(clone)
        return clone

    def from_rank_0(self, value: Any) -> Any:
        key = f"shared/{self._shared}"
        self._shared += 1
        if self.rank == 0:
            self.store.set(key, encode(value).decode())
            return value
        self._wait(key, "a value from rank 0", None)
        return decode(self.store.get(key))

    def agree(self, purpose: str, *flags: bool, timeout: timedelta | None = None) -> tuple[int, ...]:
        # One counter holds, side by side, how many ranks came and how many of them raise each flag. Who completes it
        # publishes the sum, so that everybody reads the same number.
        number = self._agreements
        self._agreements += 1
        key = f"agree/{number}"
        word = 1
        for position, flag in enumerate(flags, start=1):
            word |= int(flag) << (_FIELD * position)
        self.store.set(f"{key}/{self.rank}", purpose)
        total = self.store.add(key, word)
        mask = (1 << _FIELD) - 1
        if total & mask == self.world_size:
            purposes = [text.decode() for text in self.store.multi_get(self._arrivals(key))]
            self.store.set(f"{key}/done", json.dumps({"total": total, "purposes": list(dict.fromkeys(purposes))}))
        else:
            self._wait(f"{key}/done", purpose, timeout, key)
        done = json.loads(self.store.get(f"{key}/done"))
        if len(done["purposes"]) > 1:
            came_for = spread([text.decode() for text in self.store.multi_get(self._arrivals(key))])
            raise DistributedError(
                "The ranks went different ways: "
                + "; ".join(f"rank(s) {ranks} came to {text}" for text, ranks in came_for.items())
                + ".",
                "what is collective must be called by every rank, in the same order.",
                "look for a call under `if trainer.is_global_zero:` and move it out.",
            )
        self._forget(number - 2)
        return tuple((done["total"] >> (_FIELD * position)) & mask for position in range(1, len(flags) + 1))

    def _arrivals(self, key: str) -> list[str]:
        return [f"{key}/{rank}" for rank in range(self.world_size)]

    def _wait(self, key: str, purpose: str, timeout: timedelta | None, agreement: str | None = None) -> None:
        timeout = self.timeout if timeout is None else timeout
        # Asked again and again, since a `Store.wait` that times out writes two warnings to the terminal every time.
        begun = time.monotonic()
        end = begun + timeout.total_seconds()
        look, ping = begun + _LOOK_FOR_FAILURES, begun + _PING
        silent: set[int] = set()
        while not self.store.check([key]):
            waited = time.monotonic() - begun
            time.sleep(min(max(waited / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE))
            if time.monotonic() < look:
                continue
            look += _LOOK_FOR_FAILURES
            failure = self.first_failure()
            if failure is not None:
                raise RankFailedError(failure)
            if time.monotonic() > min(end, ping):
                # Named here and not before: on thousands of ranks each agreement would make thousands of names.
                arrivals = [] if agreement is None else self._arrivals(agreement)
                absent = [rank for rank, arrival in enumerate(arrivals) if not self.store.check([arrival])] or [0]
                late = time.monotonic() > end
                where = self.whereabouts(absent, late)
                # A rank that is alive answers, whatever it is at: one that has not done so twice is gone.
                gone = silent & {rank for rank, stack in where.items() if stack is None}
                silent = {rank for rank, stack in where.items() if stack is None}
                ping = time.monotonic() + _PING
                if not (late or gone) or self.store.check([key]):
                    continue
                waited = time.monotonic() - begun
                raise absent_error(
                    f"Rank {self.rank} came to {purpose} and waited {waited:.0f} s for rank(s) {absent}.",
                    "what is collective must be called by every rank, in the same order.",
                    "look for a call under `if trainer.is_global_zero:` and move it out; where one only takes long, "
                    "raise the strategy's timeout or step_timeout.",
                    where,
                    self.flight.left,
                )

    def whereabouts(self, ranks: Sequence[int] | None = None, late: bool = False) -> dict[int, str | None]:
        told = stacks(self.store, self.rank, self.world_size, late)
        if late:
            self.flight.leave()
        asked = [rank for rank in range(self.world_size) if rank != self.rank] if ranks is None else ranks
        return {rank: told.get(rank) for rank in asked}

    def keep_records(self, folder: str | None) -> None:
        self.flight.folder = folder

    def records(self) -> str | None:
        return self.flight.left

    def after_first_step(self) -> None:
        self._then()

    def _forget(self, number: int) -> None:
        # Everybody has come to agreement `number + 1`, so nobody reads this one any more.
        if number < 0:
            return
        self.store.delete_key(f"agree/{number}/{self.rank}")
        if self.rank == 0:
            self.store.delete_key(f"agree/{number}")
            self.store.delete_key(f"agree/{number}/done")

    def leave(self) -> None:
        self.agree("the end of the run")
        if self.store.add("left", 1) == self.world_size:
            self.store.set("all left", "")
        elif self.rank == 0:
            self.store.wait(["all left"], _PART)

    # Failures

    def report_failure(self, failure: Failure) -> None:
        self.failed = True
        number = self.store.add("failures", 1)
        self.store.set(f"failure/{number}", failure.encode())

    def first_failure(self, wait: timedelta | None = None) -> Failure | None:
        end = time.monotonic() + (wait.total_seconds() if wait is not None else 0.0)
        while True:
            reports = self._reports()
            telling = [failure for failure in reports if failure.distance < 2]
            found = first_cause(telling) if telling else None
            over = len(reports) >= self.world_size or time.monotonic() >= end
            if over or (found is not None and found.distance == 0):
                return found
            time.sleep(0.05)

    def all_failures(self, wait: timedelta) -> list[Failure]:
        end = time.monotonic() + wait.total_seconds()
        while True:
            reports = self._reports()
            if len(reports) >= self.world_size or time.monotonic() >= end:
                return reports
            time.sleep(0.05)

    def everybody_failed(self) -> bool:
        return bool(self.store.add("failures", 0) >= self.world_size)

    def silent_ranks(self) -> list[int]:
        return sorted(set(range(self.world_size)) - {failure.rank for failure in self._reports()})

    def _reports(self) -> list[Failure]:
        count = self.store.add("failures", 0)
        told = [Failure.decode(self.store.get(f"failure/{number + 1}")) for number in range(count)]
        # Who was killed tells nobody; its launcher may know.
        return told + [one for one in self.external_failures() if one.rank not in {failure.rank for failure in told}]

    def settle(self, wait: timedelta) -> None:
        """Linger after a failure until all ranks have seen it, since this process may host the store."""
        self.store.set(f"settled/{self.rank}", "")
        end = time.monotonic() + wait.total_seconds()
        while time.monotonic() < end:
            ended = {failure.rank for failure in self.external_failures() if failure.exit_code is not None}
            rest = [f"settled/{rank}" for rank in range(self.world_size) if rank not in ended]
            if not rest or self.store.check(rest):
                return
            time.sleep(0.05)
