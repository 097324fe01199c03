"""What a reader has to open: the files that a step and a start enter, and the calls from one of them into another."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import drivetrain
import drivetrain_strategies

ROOTS = tuple(str(Path(str(package.__file__)).parent) for package in (drivetrain, drivetrain_strategies))


class Entered:
    """Counts, while ``phase`` is set, the functions of drivetrain that are called. Bodies of modules are no functions.

    A call crosses if the function of drivetrain that made it, perhaps through torch, is in another file.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.files: dict[str, set[str]] = {}
        self.calls: dict[str, int] = {}
        self.crossings: dict[str, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file, phase = frame.f_code.co_filename, self.phase
        is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
        if event != "call" or not phase or not is_function or not file.startswith(ROOTS):
            return
        self.files.setdefault(phase, set()).add(file)
        self.calls[phase] = self.calls.get(phase, 0) + 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOTS):
            caller = caller.f_back
        crosses = caller is not None and caller.f_code.co_filename != file
        self.crossings[phase] = self.crossings.get(phase, 0) + crosses


def count(folder: str) -> None:
    """Print the numbers of files, calls and crossings of a start and of a step."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from drivetrain import Fit, TrainModule

    entered = Entered()

    class Net(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            entered.phase = ""
            loss = self.layer(batch[0]).square().mean()
            entered.phase = "step" if batch_idx == 5 else ""
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
    sys.setprofile(entered)
    entered.phase = "start"
    Fit(max_epochs=1, accelerator="cpu", devices=1, strategy="ddp", default_root_dir=folder).fit(Net(), data)
    sys.setprofile(None)
    for phase, files in entered.files.items():
        print("entered", phase, len(files), entered.calls[phase], entered.crossings[phase])


def test_a_step_and_a_start_enter_few_files(tmp_path: Path) -> None:  # K-05
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("entered")]
    counts = {phase: tuple(map(int, numbers)) for phase, *numbers in lines}
    assert all(got <= most for got, most in zip(counts["step"], (8, 16, 11), strict=True)), counts
    files, _, crossings = counts["start"]
    assert (files <= 110, crossings <= 700) == (True, True), counts


if __name__ == "__main__":
    count(sys.argv[1])
