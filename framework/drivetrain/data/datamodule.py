"""DataModule: where the data comes from, apart from the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drivetrain._runtime.transfer import move_to
from drivetrain.module._hyper_parameters import KeepsHyperParameters
from drivetrain.module._run_handle import RunHandle


class DataModule(RunHandle, KeepsHyperParameters):
    """Holds the loaders of a task and how its data is prepared.

    Write `prepare_data` and `setup`, and a loader for each stage that is run. Return plain loaders: dealing to the
    ranks is the engine's part.
    """

    def prepare_data(self) -> None:
        """Download and write files: called on one process of each node, before `setup`; keep no state here."""

    def setup(self, stage: str) -> None:
        """Build the data sets on every process; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up on every process, also after a failure."""

    def train_dataloader(self) -> Any:
        """Return the training loader, or a dict, list or `CombinedLoader` of several."""
        raise self._missing("train_dataloader")

    def val_dataloader(self) -> Any:
        """Return one validation loader or a list of them."""
        raise self._missing("val_dataloader")

    def test_dataloader(self) -> Any:
        """Return one test loader or a list of them."""
        raise self._missing("test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return one loader to predict on, or a list of them."""
        raise self._missing("predict_dataloader")

    # Batches

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Alter a batch on the CPU, as the loader gave it."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device."""
        return move_to(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Alter a batch on the device."""
        return batch

    # State

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this data module: JSON-able values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def _missing(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {name}")
