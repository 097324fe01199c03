"""Runs that are killed at random instants and restarted until they finish."""

from __future__ import annotations

import gc
import importlib
import random
from dataclasses import dataclass, field
from pathlib import Path

from drawing_run import KEPT
from lives import Life, Run

# Imported once instead of by every rank, because it imports all of the compiler.
IMPORTED = {"fsdp": "torch.distributed.fsdp", "zero 3": "deepspeed.runtime.zero.muon.muon_optimizer"}


@dataclass
class Tally:
    """The results of the runs of one strategy."""

    strategy: str
    runs: int = 0
    within_saves: int = 0
    resumes: int = 0
    lost: int = 0
    longest_wait: float = 0.0
    instants: list[float] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return len(self.instants)

    def __str__(self) -> str:
        """Return a table row."""
        columns = {
            "strategy": self.strategy,
            "runs": self.runs,
            "kills": self.kills,
            "within a save": self.within_saves,
            "seconds after a first step": f"{min(self.instants):.2f} to {max(self.instants):.2f}",
            "resumes": self.resumes,
            "steps lost at most": self.lost,
            "longest wait": f"{self.longest_wait:.1f} s",
        }
        row = "  ".join(f"{value!s:>{len(name)}}" for name, value in columns.items())
        return "  ".join(columns) + "\n" + row


def kill_runs(folder: Path, strategy: str, kills: int, seed: int) -> Tally:
    """Kill runs of ``strategy`` a total of ``kills`` times, each one to three times, and compare the results.

    Raises:
        AssertionError: a run had other results, lost saved steps, or left something behind.
        RankFailedError: a rank failed that was not killed.
    """
    importlib.import_module(IMPORTED.get(strategy, "torch"))
    gc.freeze()  # DeepSpeed forces garbage collections, in which modules imported so far need not be examined
    draw, tally = random.Random(f"{strategy} {seed}"), Tally(strategy)
    undisturbed = Life(Run(folder / "undisturbed", strategy, every=1, in_background=False)).live()
    while tally.kills < kills:
        run = Run(folder / str(tally.runs), strategy, every=draw.choice((1, 2)), in_background=draw.random() < 0.5)
        tally.runs += 1
        try:
            _until_its_end(run, undisturbed, draw, tally, min(draw.randint(1, 3), kills - tally.kills))
        except Exception as error:
            error.add_note(f"{run}, seed {seed}, killed at {tally.instants}")
            raise
    return tally


def _until_its_end(run: Run, undisturbed: Life, draw: random.Random, tally: Tally, kills: int) -> None:
    victims = [[rank] for rank in range(run.ranks)] + [list(range(run.ranks))]
    life = Life(run)
    while not life.ended:
        before, whole, leftovers = life, run.newest_step(), run.leftovers()
        tally.resumes += whole > 0
        remaining = undisturbed.seconds * (1 - whole / undisturbed.reached)
        instant = draw.uniform(0, remaining)
        chosen = draw.choice(victims) if kills else []
        life = Life(run).live(instant, chosen)

        assert life.began_at == whole, f"went on from step {life.began_at}, not {whole}"
        assert life.losses.items() <= undisturbed.losses.items(), "other losses"
        lost = before.reached - whole
        assert lost <= run.every * (2 if run.in_background else 1), f"{lost} steps were lost"
        tally.lost = max(tally.lost, lost)
        saved = run.newest_step() > whole
        assert not (saved and leftovers & run.leftovers()), f"{leftovers} outlived a save"
        if not life.ended:
            kills -= 1
            tally.instants.append(instant)
            tally.within_saves += bool(run.leftovers() - leftovers)
            tally.longest_wait = max(tally.longest_wait, life.waited)
    assert life.results == undisturbed.results, "another end"
    assert len(run.checkpoints()) <= KEPT, f"{run.checkpoints()} are left"
    assert not (saved and run.leftovers()), f"{run.leftovers()} are left"
