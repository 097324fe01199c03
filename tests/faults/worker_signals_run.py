"""Trains on data that workers read, and prints when a signal should arrive: while workers start, or within a read."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import Fit, TrainModule


class Slow(Dataset[Any]):
    """Loading it in a worker takes a second; reading one sample takes longer than torch's check for living workers."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.moment == "starting":
            print("NOW", flush=True)
            time.sleep(1)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05)
        if self.moment == "reading" and index == 8:
            print("NOW", flush=True)
            time.sleep(6)
        return torch.tensor([float(index), 1.0])


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    method, moment, folder = sys.argv[1:]
    trainer = Fit(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        max_epochs=1,
        preemption_signals=["SIGTERM", "SIGUSR1"],
    )
    trainer.fit(Net(), DataLoader(Slow(moment), 2, num_workers=1, multiprocessing_context=method))
