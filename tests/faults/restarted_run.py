"""A run under torchrun that records its starts, steps and results: `python restarted_run.py folder how`.

If ``how`` is "killed", rank 1 is killed in its third step; if it is "slow", each step takes a moment, and ranks wait
for each other for `TIMEOUT` seconds only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drawing_run import STRATEGIES, train

from drivetrain_strategies import DDPStrategy

TIMEOUT = 4.0


def undisturbed(folder: Path) -> Any:
    """Return the results of the run without restarts, on this rank."""
    return train(folder, "ddp", 1, False, lambda *words: None)


def results(folder: Path) -> list[Any]:
    """Return the results of both ranks."""
    return [json.loads((folder / f"results-{rank}").read_text()) for rank in (0, 1)]


def starts(folder: Path) -> list[int]:
    """Return the step at which each start of rank 0 began training."""
    return [int(step) for step in (folder / "starts-0").read_text().split()]


def main(folder: Path, how: str) -> None:
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]

    def tell(what: str, *values: Any) -> None:
        if what == "from":
            with (folder / f"starts-{rank}").open("a") as file:
                file.write(f"{values[0]}\n")
        if what == "step":
            (folder / f"step-{rank}").write_text(str(values[0]))
            time.sleep(0.2 * (how == "slow"))
            if (how, restarts, rank, *values) == ("killed", "0", "1", 3):
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    if how == "slow":
        STRATEGIES["ddp"] = partial(DDPStrategy, timeout=timedelta(seconds=TIMEOUT))
    every = 2 if how == "slow" else 1  # the link goes down after step 3, and not within a save
    result = train(folder / "run", "ddp", every, False, tell)
    (folder / f"results-{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
