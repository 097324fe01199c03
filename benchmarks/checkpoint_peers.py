"""The same network and optimizer saved and loaded by other frameworks; a missing package is reported."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader

from benchmarks.checkpoint_ways import State, Wait, Way


class PlainDCP:
    """torch.distributed.checkpoint, called as its tutorial does."""

    name, syncs, checks = "torch.distributed.checkpoint", True, False

    def __init__(self, state: State) -> None:
        self._state = state

    def _all(self) -> dict[str, Any]:
        net, optimizer = get_state_dict(self._state.net, self._state.optimizer)
        return {"net": net, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self._all(), checkpoint_id=folder)  # type: ignore[attr-defined]

    def load(self, folder: Path) -> None:
        saved = self._all()
        dcp.load(saved, checkpoint_id=folder)  # type: ignore[attr-defined]
        set_state_dict(
            self._state.net,
            self._state.optimizer,
            model_state_dict=saved["net"],
            optim_state_dict=saved["optimizer"],
        )

    def begin(self, folder: Path) -> Wait:
        future: Any = dcp.async_save(self._all(), checkpoint_id=folder)  # type: ignore[attr-defined]
        return lambda: future.result()


class Lightning:
    """Lightning's Trainer."""

    name, syncs, checks = "Lightning", False, False

    def __init__(self, state: State) -> None:
        import lightning.pytorch as pl
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        class Module(pl.LightningModule):
            """Takes no step: the optimizer already has moments."""

            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.net = state.net

            def training_step(self, batch: Any) -> None:
                self.optimizers()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return state.optimizer

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        self._trainer = pl.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._trainer.fit(Module(), DataLoader([0]))  # type: ignore[arg-type]  # a list is a map-style dataset, too
        self._background = lambda: AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, folder: Path) -> None:
        self._trainer.save_checkpoint(folder / "all.ckpt")

    def load(self, folder: Path) -> None:
        strategy = self._trainer.strategy
        checkpoint = strategy.load_checkpoint(folder / "all.ckpt")
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)

    def begin(self, folder: Path) -> Wait:
        strategy = self._trainer.strategy
        usual, strategy.checkpoint_io = strategy.checkpoint_io, self._background()
        try:
            self.save(folder)
            return strategy.checkpoint_io.teardown
        finally:
            strategy.checkpoint_io = usual


class Accelerate:
    """Hugging Face's Accelerator."""

    name, syncs, checks = "Accelerate", False, False

    def __init__(self, state: State) -> None:
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=True)
        self._accelerator.prepare(state.net, state.optimizer)

    def save(self, folder: Path) -> None:
        self._accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self._accelerator.load_state(str(folder))


PEERS: dict[str, Callable[[State], Way]] = {one.name: one for one in (PlainDCP, Lightning, Accelerate)}
"""Makes each of them; raises ImportError where its package is missing."""
