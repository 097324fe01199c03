"""Injects seeded faults one after the other into runs that are restarted until they finish."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import os
import random
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from damaging import check_and_remove, damage
from drawing_run import KEPT, STRATEGIES
from killing import IMPORTED
from lives import Life, Run
from outcomes import Outcome, Tally
from striking import HOOKS, OTHERS, WHERE_RESUMED, Fault

from drivetrain.launchers import RankFailedError

_TURNS = ["raises", "killed", "slow", "raises", "killed in a save", "cut off", "exits", "damaged", "full disk"]
_TURNS += ["stalls", "leaves", "raises", "refused"]
"""What the first faults of runs are, by turns; exceptions more often, since every hook is to see some."""
_NOT_ALONE = {"stalls", "cut off", "refused"}
_STALLS_IN = {"on_train_batch_start": 3, "training_step": 3, "state_dict": 2}
"""Where ranks stall, and from which call on: the shorter timeout holds once a step has been made."""
_STALLS_IN_FRESH = _STALLS_IN | {"on_validation_start": 2, "on_train_epoch_end": 1}
LIMIT = 15.0
"""Seconds from a fault until every process has ended: G-01, G-02."""


def try_faults(
    folder: Path, strategy: str, faults: int, seed: int, first: Sequence[Fault] = (), only: Sequence[int] = ()
) -> Tally:
    """Inject faults into runs of ``strategy``, one to three each, and compare the results. It is called on several
    ranks, each of which takes the next run that no other rank has taken.

    Args:
        folder: where runs save.
        strategy: one of `STRATEGIES`.
        faults: the minimum number of faults.
        seed: the seed for all draws, together with the run's number.
        first: faults for one run, which precedes the drawn ones.
        only: the numbers of the runs to make, regardless of ``faults``.

    Returns:
        The outcomes. A run that hung, named another cause, lost saved steps, or had other results is among its
        ``failed``.
    """
    importlib.import_module(IMPORTED.get(strategy, "torch"))
    gc.freeze()  # DeepSpeed forces garbage collections, in which modules imported so far need not be examined
    tally, taken = Tally(), folder / "taken"
    taken.mkdir(exist_ok=True)
    name = f"undisturbed {os.environ['RANK']}"
    undisturbed = Life(Run(folder / name, strategy, every=1, in_background=False)).live(fault=Fault())
    assert undisturbed.ended, undisturbed.error
    for number in only or itertools.count():
        if not only and sum(int(one.read_text() or 0) for one in taken.iterdir()) >= faults:
            break
        with suppress(FileExistsError):
            (taken / str(number)).touch(exist_ok=False)
            before = len(tally.outcomes)
            _Struck(folder, strategy, number, seed, undisturbed, tally).live(first if number == 0 else ())
            (taken / str(number)).write_text(str(len(tally.outcomes) - before))
    return tally


class _Struck:
    """A run into which faults are injected."""

    def __init__(self, folder: Path, strategy: str, number: int, seed: int, undisturbed: Life, tally: Tally) -> None:
        self._draw = random.Random(f"{strategy} {seed} {number}")
        self._run = Run(
            folder / f"run {number}", strategy, every=self._draw.choice((1, 2)), in_background=self._draw.random() < 0.3
        )
        self._number, self._undisturbed, self._tally = number, undisturbed, tally
        turns = [kind for kind in _TURNS if self._run.ranks > 1 or kind not in _NOT_ALONE]
        self._kinds = [turns[number % len(turns)], *self._draw.choices(turns, k=self._draw.randint(0, 2))]
        # Leading exceptions also take the places in turn, and continue from one strategy to the next.
        self._turn = (number // len(turns) * 3 + turns[: number % len(turns)].count("raises")) * len(STRATEGIES)
        self._turn += list(STRATEGIES).index(strategy)

    def live(self, given: Sequence[Fault]) -> None:
        """Restart it until it finishes."""
        tally = self._tally
        outcomes: list[Outcome] = []
        tally.runs += 1
        try:
            self._until_its_end(list(given), outcomes)
        except Exception as error:
            struck = "; ".join(str(one.fault) for one in outcomes)
            tally.failed[self._number] = (
                f"{self._run}, struck by {struck}\n{''.join(traceback.format_exception(error))}"
            )
            print(f"FAILED: {self._run.strategy}, run {self._number}: {tally.failed[self._number]}", flush=True)
        else:
            for one in outcomes:
                one.survived = True
        tally.outcomes += outcomes

    def _until_its_end(self, given: list[Fault], outcomes: list[Outcome]) -> None:
        run, undisturbed, life = self._run, self._undisturbed, Life(self._run)
        kinds = [fault.kind for fault in given] or self._kinds
        while not life.ended:
            before, whole = life, run.newest_step()
            fault = given.pop(0) if given else self._next(kinds[0], whole) if kinds else Fault()
            outcome, before_it = Outcome(run.strategy, self._number, fault), outcomes[-1] if outcomes else None
            damaged = None
            if fault.kind == "damaged":
                damaged = damage(run, self._draw)
                if damaged is None:
                    # Damage requires two checkpoints, so there is another start that is killed late enough.
                    life = Life(run).live(fault=self._late_kill())
                    continue
                fault = outcome.fault = dataclasses.replace(fault, place=f"{damaged.path.name}, {damaged.how}")
            self._tally.resumes += whole > 0
            if fault.kind != "none":
                outcomes.append(outcome)
            # Damage is done between starts, not during a run.
            life = Life(run).live(fault=Fault() if damaged else fault)
            assert not life.hung, life.error
            assert life.losses.items() <= undisturbed.losses.items(), "other losses"
            intervals = 2 if run.in_background else 1
            if damaged is not None:
                check_and_remove(damaged, life)
                # The last save is lost too.
                intervals += 1
                whole, before_it = life.began_at if life.ended else run.newest_step(), outcome
            lost = max(0, before.reached - whole)
            assert lost <= run.every * intervals, f"{lost} steps were lost"
            if before_it is not None:
                before_it.lost = max(before_it.lost, lost)
            if damaged is None and life.struck is None and fault.kind != "none":
                assert life.ended, life.error
                outcomes.pop()  # the run never reached the place
                break
            if kinds:
                kinds.pop(0)
            if damaged is None:
                _check(life, fault, outcome)
            if fault.kind != "none":
                waited = "" if outcome.waited is None else f", {outcome.waited:.1f} s"
                print(f"{run.strategy}, run {self._number}: {fault}{waited}", flush=True)
        assert life.results == undisturbed.results, "another end"
        assert len(run.checkpoints()) <= KEPT + 1, f"{run.checkpoints()} are left"

    def _next(self, kind: str, whole: int) -> Fault:
        run, draw = self._run, self._draw
        rank = draw.randrange(run.ranks)
        calls = self._undisturbed.calls[rank]
        places = [place for place in (*HOOKS, *OTHERS) if calls.get(place)]
        if whole:
            # A resumed run makes no sanity check, and reaches the places where state is loaded.
            places = [place for place in places if "sanity" not in place] + [*WHERE_RESUMED] * 4
        place = draw.choice(places)
        if kind == "raises" and not whole:
            place = places[self._turn % len(places)]
        elif kind == "full disk":
            place = "on_save_checkpoint"
        elif kind == "killed in a save":
            place = "writing"
            rank = rank if calls.get(place) else 0
        elif kind == "stalls":
            place = draw.choice([*(_STALLS_IN if whole else _STALLS_IN_FRESH)])
        often = self._undisturbed.calls[rank].get(place, 1)
        if place in ("writing", "on_save_checkpoint", "state_dict"):
            often = max(1, often // run.every)
        # How many of them are left when the run resumes.
        often = max(1, int(often * (1 - whole / self._undisturbed.reached)))
        first = _STALLS_IN_FRESH[place] if kind == "stalls" else 1
        nth = draw.randint(first, max(first, often))
        return Fault("killed" if kind == "killed in a save" else kind, rank, place, nth)

    def _late_kill(self) -> Fault:
        missing = 2 - len(self._run.checkpoints()) + self._run.in_background
        return Fault("killed", 0, "training_step", 2 * self._run.every * missing + 1)


def _check(life: Life, fault: Fault, outcome: Outcome) -> None:
    """Check that the run ended soon, and that its message names the cause."""
    if fault.kind in ("slow", "none"):
        assert life.error is None, life.error
        return
    # A full disk, or a lost connection, after everything else is done.
    assert not life.ended or fault.kind in ("full disk", "cut off"), "nothing came of it"
    outcome.waited = life.waited
    assert life.waited < LIMIT, f"{life.waited:.1f} s"
    error, told = life.error, str(life.error)
    failure = error.failure if isinstance(error, RankFailedError) else None
    if fault.kind == "raises":
        assert "Struck" in told or type(error).__name__ == "Struck", told
        assert failure is None or failure.rank == fault.rank, told
    elif fault.kind in ("killed", "exits", "leaves"):
        cause = {"killed": "SIGKILL", "exits": "SystemExit: 7", "leaves": "exit code 8"}[fault.kind]
        alone = isinstance(error, SystemExit) and error.code == 7
        assert alone or (failure is not None and failure.rank == fault.rank and cause in told), told
    elif fault.kind == "stalls":
        assert f"rank(s) [{fault.rank}]" in told, told
        assert "_stall" in told, told
    elif fault.kind == "refused":
        assert failure is not None, told
        assert (failure.rank, "trying to connect" in told) == (fault.rank, True), told
    elif fault.kind == "full disk":
        assert life.ended or "File too large" in told, told
    else:
        assert life.ended or error is not None
