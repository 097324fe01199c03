"""Faulty runs end soon, name the cause, and resume with equal results: F-02, F-05, F-07, F-08, G-01, G-02, G-04."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import os
import random
import statistics
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
from drawing_run import KEPT, STRATEGIES
from lives import Life, Run
from striking import ANY_INSTANT, HOOKS, OTHERS, WHERE_RESUMED, Fault

from drivetrain.launchers import RankFailedError
from drivetrain.testing import requires_linux, run_distributed

FIRST = {
    "single": [Fault(ANY_INSTANT), Fault(ANY_INSTANT)],
    "ddp": [Fault("stalls", 1, "training_step", 9), Fault("killed", 0, "on_validation_start"), Fault(ANY_INSTANT)],
    "fsdp": [Fault("cut off", 1, "on_after_backward", 5), Fault("raises", 1, "on_save_checkpoint", 2)],
    "zero 3": [Fault(ANY_INSTANT), Fault(ANY_INSTANT)],
}
"""What is tried first; all that is tried where nobody asks for more."""

FAULTS = int(os.environ.get("FAULTS", "0"))
SEED = int(os.environ.get("FAULTS_SEED", "5"))
RUNS = [int(number) for number in os.environ.get("FAULTS_RUNS", "").split(",") if number]
AT_ONCE = int(os.environ.get("FAULTS_AT_ONCE", "2" if FAULTS else "1"))
OUTCOMES: list[Outcome] = []

KINDS = ["raises", "killed", "slow", "raises", "killed in a save", "cut off", "exits", "full disk", "stalls", "leaves"]
KINDS += ["raises", "refused"]
"""What the first faults of runs are, by turns; exceptions more often, since every hook is to see some."""
_NOT_ALONE = {"stalls", "cut off", "refused"}
_STALLS_IN = {"on_train_batch_start": 3, "training_step": 3, "state_dict": 2}
"""Where ranks stall, and from which call on: the shorter timeout holds once a step has been made."""
_STALLS_IN_FRESH = _STALLS_IN | {"on_validation_start": 2, "on_train_epoch_end": 1}
LIMIT = 15.0
"""Seconds from a fault until every process has ended: G-01, G-02."""

# Imported once instead of by every rank, because it imports all of the compiler.
_IMPORTED = {"fsdp": "torch.distributed.fsdp", "zero 3": "deepspeed.runtime.zero.muon.muon_optimizer"}


@dataclasses.dataclass
class Outcome:
    """The outcome of a fault: seconds to the end of every process, repeated steps, and whether results are equal."""

    strategy: str
    fault: Fault
    waited: float | None = None
    lost: int = 0
    survived: bool = False


@dataclasses.dataclass
class Tally:
    """The outcomes of the faults in some runs, and the runs that did not stand them."""

    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)

    def waits(self, kinds: str = "") -> list[float]:
        """Return the seconds from a fault to the end of every process, for kinds that contain this text."""
        return [one.waited for one in self.outcomes if one.waited is not None and kinds in one.fault.kind]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table by kind and by strategy, and the places at which exceptions were raised."""
    columns = "tried | survived | steps lost at most | fault to end of every process: median | longest"
    lines = [f"kind or strategy | {columns}"]
    for name in dict.fromkeys([*(one.fault.kind for one in outcomes), *(one.strategy for one in outcomes)]):
        of_it = [one for one in outcomes if name in (one.fault.kind, one.strategy)]
        waits = [one.waited for one in of_it if one.waited is not None] or [0.0]
        numbers = [len(of_it), sum(one.survived for one in of_it), max(one.lost for one in of_it)]
        lines.append(
            f"{name} | {' | '.join(map(str, numbers))} | {statistics.median(waits):.1f} s | {max(waits):.1f} s"
        )
    raised = sorted({one.fault.place for one in outcomes if one.fault.kind == "raises"})
    return "\n".join([*lines, f"exceptions were raised at {len(raised)} places: {', '.join(raised)}"])


def try_faults(
    folder: Path,
    strategy: str,
    faults: int,
    seed: int,
    first: Sequence[Fault] = (),
    only: Sequence[int] = (),
    kinds: Sequence[str] = tuple(KINDS),
) -> Tally:
    """Inject at least this many faults into runs, ``first`` into one and one to three drawn ones into each other, and
    compare the results with those of an undisturbed run. With ``only``, make the runs of these numbers.

    It is called on several ranks, which take turns.
    """
    importlib.import_module(_IMPORTED.get(strategy, "torch"))
    gc.freeze()  # DeepSpeed forces garbage collections, in which modules imported so far need not be examined
    tally, rank, ranks = Tally(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    undisturbed = Life(Run(folder / f"undisturbed {rank}", strategy, every=1, in_background=False)).live(Fault())
    assert undisturbed.ended, undisturbed.error
    for number in itertools.islice(only or itertools.count(), rank, None, ranks):
        if not only and ranks * len(tally.outcomes) >= faults:
            break
        draw = random.Random(f"{strategy} {seed} {number}")
        every, in_background = draw.choice((1, 2)), draw.random() < 0.3
        run = Run(folder / f"run {number}", strategy, every, in_background)
        turns = [kind for kind in kinds if run.ranks > 1 or kind not in _NOT_ALONE]
        drawn = [turns[number % len(turns)], *draw.choices(turns, k=draw.randint(0, 2))]
        outcomes: list[Outcome] = []
        try:
            _until_its_end(run, draw, [*first] if number == 0 and first else drawn, undisturbed, outcomes)
        except Exception as error:
            struck = "; ".join(str(one.fault) for one in outcomes)
            tally.failed[number] = f"{run}, struck by {struck}\n{''.join(traceback.format_exception(error))}"
            print(f"FAILED: {strategy}, run {number}: {tally.failed[number]}", flush=True)
        tally.outcomes += outcomes
    return tally


def _until_its_end(
    run: Run, draw: random.Random, faults: Sequence[Fault | str], undisturbed: Life, outcomes: list[Outcome]
) -> None:
    """Restart the run with these faults, or faults of these kinds, until it finishes."""
    left, life = list(faults), Life(run)
    while not life.ended:
        before, whole, leftovers = life, run.newest_step(), run.leftovers()
        fault = left.pop(0) if left else Fault()
        if isinstance(fault, str) or fault.kind == ANY_INSTANT:
            fault = _drawn(run, draw, fault if isinstance(fault, str) else fault.kind, whole, undisturbed)
        life = Life(run).live(fault)
        assert not life.hung, life.error
        assert life.losses.items() <= undisturbed.losses.items(), "other losses"
        lost = max(0, before.reached - whole)
        assert lost <= run.every * (2 if run.in_background else 1), f"{lost} steps were lost"
        if outcomes:
            outcomes[-1].lost = lost
        if life.struck is None and fault.kind != "none":
            assert life.ended, life.error  # the run never reached the place
            break
        if fault.kind != "none":
            outcomes.append(Outcome(run.strategy, fault))
        if fault.kind not in ("none", "slow"):
            outcomes[-1].waited = life.waited
        _check(life, fault)
        if fault.kind in ("none", ANY_INSTANT):
            assert life.began_at == whole, f"went on from step {life.began_at}, not {whole}"
            saved = run.newest_step() > whole
            assert not (saved and leftovers & run.leftovers()), f"{leftovers} outlived a save"
        if fault.kind == ANY_INSTANT and run.leftovers() - leftovers:
            outcomes[-1].fault = dataclasses.replace(fault, kind=f"{ANY_INSTANT}, in a save")
        print(f"{run}: {fault}, {life.waited:.1f} s", flush=True)
    assert life.results == undisturbed.results, "another end"
    assert len(run.checkpoints()) <= KEPT + 1, f"{run.checkpoints()} are left"
    for one in outcomes:
        one.survived = True


def _drawn(run: Run, draw: random.Random, kind: str, whole: int, undisturbed: Life) -> Fault:
    left = 1 - whole / undisturbed.reached  # of the run, when it resumes
    if kind == ANY_INSTANT:
        milliseconds = int(1000 * draw.uniform(0, undisturbed.seconds * left))
        return Fault(kind, draw.choice([*range(run.ranks), -1]), "anywhere", milliseconds)
    rank = draw.randrange(run.ranks)
    calls = undisturbed.calls[rank]
    places = [place for place in (*HOOKS, *OTHERS) if calls.get(place)]
    if whole:
        # A resumed run makes no sanity check, and reaches the places where state is loaded.
        places = [place for place in places if "sanity" not in place] + [*WHERE_RESUMED] * 4
    place = draw.choice(places)
    if kind == "full disk":
        place = "on_save_checkpoint"
    elif kind == "killed in a save":
        place = "writing"
        rank = rank if calls.get(place) else 0
    elif kind == "stalls":
        place = draw.choice([*(_STALLS_IN if whole else _STALLS_IN_FRESH)])
    often = undisturbed.calls[rank].get(place, 1)
    if place in ("writing", "on_save_checkpoint", "state_dict"):
        often = max(1, often // run.every)
    first = _STALLS_IN_FRESH[place] if kind == "stalls" else 1
    nth = draw.randint(first, max(first, int(often * left)))
    return Fault("killed" if kind == "killed in a save" else kind, rank, place, nth)


def _check(life: Life, fault: Fault) -> None:
    """Check that the run ended soon, and that its message names the cause."""
    if fault.kind in ("slow", "none"):
        assert life.error is None, life.error
        return
    # A full disk, or a lost connection, after everything else is done.
    assert not life.ended or fault.kind in ("full disk", "cut off", ANY_INSTANT), "nothing came of it"
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
    elif fault.kind == ANY_INSTANT:  # the killed rank is named, rather than one that failed as a consequence
        named = failure is not None and fault.rank in (-1, failure.rank) and failure.signal_name == "SIGKILL"
        assert life.ended or named, told
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


def _try(folder: Path, strategy: str, first: Sequence[Fault], kinds: Sequence[str], test: str) -> Tally:
    faults = max(len(first), -(-FAULTS // len(STRATEGIES)))
    # In processes that have imported torch and have no threads, so that ranks can be forked from them quickly.
    task = (folder, strategy, faults, SEED, first, RUNS, kinds)
    tally = Tally()
    for share in run_distributed(try_faults, AT_ONCE, *task, process_group=None, timeout=50 + 25 * FAULTS):
        tally.outcomes += share.outcomes
        tally.failed |= share.failed
    OUTCOMES.extend(tally.outcomes)
    print(f"\n{table(OUTCOMES)}")
    failed = ",".join(str(number) for number in sorted(tally.failed))
    variables = f"FAULTS={FAULTS} FAULTS_SEED={SEED} FAULTS_RUNS={failed}"
    again = f"""{variables} make faults ARGS="-k '{test} and {strategy.split()[0]}'\""""
    assert not failed, "\n".join([f"again: {again}", *tally.failed.values()])
    assert RUNS or len(tally.outcomes) >= faults
    assert max(tally.waits(), default=0.0) < LIMIT
    return tally


@requires_linux()
@pytest.mark.timeout(60 + 25 * FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_with_faults_has_the_same_results(strategy: str, tmp_path: Path) -> None:
    raised = _try(tmp_path, strategy, FIRST[strategy], KINDS, "run_with_faults").waits("raises")
    assert len(raised) < 3 or statistics.median(raised) < 5


@requires_linux()
@pytest.mark.timeout(60 + 25 * FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.skipif(not FAULTS, reason="test_a_run_with_faults kills a few: make faults")
def test_a_killed_run_has_the_same_results(strategy: str, tmp_path: Path) -> None:
    tally = _try(tmp_path, strategy, (), [ANY_INSTANT], "killed_run")
    within = [one for one in tally.outcomes if one.fault.kind.endswith("in a save")]
    assert within or len(tally.outcomes) < 10, "no kill hit a save: the instants are chosen badly"
