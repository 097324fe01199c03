"""Seeded faults, one after the other, in runs that are started again until they have come to their end."""

from __future__ import annotations

import gc
import importlib
import random
import shutil
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drawing_run import KEPT
from killing import IMPORTED
from lives import Life, Run
from striking import HOOKS, OTHERS, Fault

from drivetrain.checkpoint import load, verify
from drivetrain.errors import CheckpointError
from drivetrain.launchers import RankFailedError

WEIGHTS = {"raises": 10, "killed": 3, "exits": 1, "leaves": 1, "stalls": 2, "slow": 2, "full disk": 2, "cut off": 2}
WEIGHTS |= {"damaged": 2, "refused": 1}
_ALONE = {"raises", "killed", "exits", "leaves", "slow", "full disk", "damaged"}
LIMIT = 15.0
"""Seconds from a fault until every process has ended: G-01, G-02."""


@dataclass
class Tally:
    """What came of the faults in the runs of one strategy."""

    strategy: str
    kinds: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    runs: int = 0
    resumes: int = 0
    lost: int = 0
    noticed: list[float] = field(default_factory=list)
    """Seconds from a rank's exception to the end of every process."""
    waited: list[float] = field(default_factory=list)
    """The same from any fault that ends a run."""

    @property
    def faults(self) -> int:
        return self.kinds.total()

    def row(self) -> dict[str, Any]:
        """What a table shows."""
        median = statistics.median(self.noticed) if self.noticed else 0.0
        return {
            "strategy": self.strategy,
            "faults": self.faults,
            "survived": self.survived,
            "runs": self.runs,
            "resumes": self.resumes,
            "steps lost at most": self.lost,
            "exception to end, median": f"{median:.1f} s",
            "longest": f"{max(self.noticed, default=0.0):.1f} s",
            "longest wait": f"{max(self.waited, default=0.0):.1f} s",
        }


def table(tallies: list[Tally]) -> str:
    """Rows under a head, and how many there were of each kind."""
    rows = [tally.row() for tally in tallies]
    lines = [" | ".join(rows[0]), *(" | ".join(str(value) for value in row.values()) for row in rows)]
    kinds = sum((tally.kinds for tally in tallies), Counter())
    return "\n".join([*lines, ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())])


def try_faults(folder: Path, strategy: str, faults: int, seed: int, first: Sequence[Fault] = ()) -> Tally:
    """Let so many faults strike runs of ``strategy``, one to three each, and compare what they come to.

    ``first`` come before those that are drawn.

    Raises:
        AssertionError: a run hung, named another cause, lost more than it had not saved, or came to something else.
    """
    importlib.import_module(IMPORTED.get(strategy, "torch"))
    gc.freeze()  # DeepSpeed has the garbage collected, of which none is in all that was imported
    draw, tally, given = random.Random(f"{strategy} {seed}"), Tally(strategy), list(first)
    undisturbed = Life(Run(folder / "undisturbed", strategy, every=1, beside=False)).live(fault=Fault())
    assert undisturbed.ended, undisturbed.error
    while tally.faults < faults:
        run = Run(folder / str(tally.runs), strategy, every=draw.choice((1, 2)), beside=draw.random() < 0.3)
        tally.runs += 1
        struck: list[Any] = []
        try:
            count = min(draw.randint(1, 3), faults - tally.faults)
            _until_its_end(run, undisturbed, draw, tally, count, struck, given)
        except Exception as error:
            error.add_note(f"{run}, seed {seed}: {struck}")
            raise
    return tally


def _until_its_end(
    run: Run,
    undisturbed: Life,
    draw: random.Random,
    tally: Tally,
    faults: int,
    struck: list[Any],
    given: list[Fault],
) -> None:
    life = Life(run)
    while not life.ended:
        before, whole = life, run.newest_step()
        fault = Fault()
        if faults:
            fault = given.pop(0) if given else _draw(run, draw, undisturbed.calls)
        struck.append(fault)
        if fault.kind == "damaged":
            damaged = _damage(run, draw)
            if damaged is None:
                continue
            life = Life(run).live(fault=Fault())
            _remove_damaged(run, damaged, life)
            whole = run.newest_step() if not life.ended else whole
        else:
            tally.resumes += whole > 0
            life = Life(run).live(fault=fault)
            if life.struck is None and fault.kind != "none":
                fault = Fault()  # it never came there
            lost = max(0, before.reached - whole)
            assert lost <= run.every * (2 if run.beside else 1), f"{lost} steps were lost"
            tally.lost = max(tally.lost, lost)
        assert life.losses.items() <= undisturbed.losses.items(), "other losses"
        if fault.kind != "none":
            print(f"{run.strategy}: {fault}, {life.waited:.1f} s", flush=True)
            _check(life, fault, tally)
            tally.kinds[fault.kind] += 1
            tally.survived += 1
            faults -= 1
        else:
            assert life.ended, life.error
    assert life.results == undisturbed.results, "another end"
    assert len(run.checkpoints()) <= KEPT + 1, f"{run.checkpoints()} are left"


def _draw(run: Run, draw: random.Random, calls: dict[str, int]) -> Fault:
    kinds = [kind for kind in WEIGHTS if run.ranks > 1 or kind in _ALONE]
    kind = draw.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
    places = [place for place in (*HOOKS, *OTHERS) if calls.get(place)]
    if kind == "full disk":
        places = ["on_save_checkpoint"]
    elif kind == "stalls":  # where the shorter timeout holds: after a step
        places = ["on_train_batch_start", "on_validation_start", "training_step", "on_train_epoch_end", "state_dict"]
    place = draw.choice(places)
    first = 3 if kind == "stalls" and calls[place] > 3 else 1
    return Fault(kind, draw.randrange(run.ranks), place, draw.randint(first, calls[place]))


def _check(life: Life, fault: Fault, tally: Tally) -> None:
    """Whether the run ended, soon, and whether the user is told why."""
    if fault.kind == "slow":
        assert life.error is None, life.error
        return
    assert not life.ended or fault.kind == "full disk", "nothing came of it"
    tally.waited.append(life.waited)
    assert life.waited < LIMIT, f"{life.waited:.1f} s"
    error, told = life.error, str(life.error)
    failure = error.failure if isinstance(error, RankFailedError) else None
    if fault.kind == "raises":
        tally.noticed.append(life.waited)
        assert "Struck" in told or type(error).__name__ == "Struck", told
        assert failure is None or failure.rank == fault.rank, told
    elif fault.kind in ("killed", "exits", "leaves"):
        cause = {"killed": "SIGKILL", "exits": "SystemExit: 7", "leaves": "exit code 8"}[fault.kind]
        alone = isinstance(error, SystemExit) and error.code == 7
        assert alone or (failure is not None and failure.rank == fault.rank and cause in told), told
    elif fault.kind == "stalls":
        assert f"rank(s) [{fault.rank}]" in told, told
        assert "_stall" in told, told
    elif fault.kind == "full disk":
        assert life.ended or "File too large" in told, told
    else:
        assert error is not None


def _damage(run: Run, draw: random.Random) -> Path | None:
    """Damage the newest checkpoint, if there is one and another to fall back to; return its path."""
    paths = sorted((run.folder / name for name in run.checkpoints()), key=lambda path: load(path).manifest.written)
    if len(paths) < 2:
        return None
    files = [path for path in sorted(paths[-1].rglob("*")) if path.is_file() and path.stat().st_size]
    path = draw.choice(files)
    content = bytearray(path.read_bytes())
    how = draw.choice(("altered", "cut short", "gone"))
    if how == "gone":
        path.unlink()
    elif how == "cut short":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[draw.randrange(len(content))] ^= 0x10
        path.write_bytes(content)
    return paths[-1]


def _remove_damaged(run: Run, damaged: Path, life: Life) -> None:
    """A damaged checkpoint is either never chosen, or refused by name, before anything has changed."""
    if not life.ended:
        assert isinstance(life.error, CheckpointError | RankFailedError), life.error
        assert damaged.name in str(life.error), life.error
        assert life.reached == 0
    if damaged.exists() and (not life.ended or verify(damaged)):
        shutil.rmtree(damaged)
