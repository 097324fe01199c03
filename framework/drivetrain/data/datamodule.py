"""DataModule: where the data comes from, apart from the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.hyper_parameters import HyperParameters, collect_init_arguments
from drivetrain.transfer import move_to

if TYPE_CHECKING:
    from drivetrain.fit import Fit


class DataModule:
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

    @property
    def trainer(self) -> Fit:
        """The `Fit` that is running.

        Raises:
            ConfigurationError: there is none just now.
        """
        trainer: Fit | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise ConfigurationError(
                f"{type(self).__name__} is not in a run, so it has no trainer.",
                "trainer exists only while fit, validate, test or predict runs.",
                "read the result from the Fit object after the run.",
            )
        return trainer

    @property
    def hparams(self) -> HyperParameters:
        """What `save_hyperparameters` kept."""
        kept: HyperParameters = self.__dict__.setdefault("_hyper_parameters", HyperParameters())
        return kept

    def save_hyperparameters(self, *names: str, ignore: Any = ()) -> None:
        """Keep the arguments of ``__init__`` in `hparams`.

        Args:
            names: which; all where none are given.
            ignore: names to leave out.

        Raises:
            ConfigurationError: names a value that JSON cannot hold.
        """
        self.hparams.update(collect_init_arguments(self, names, ignore))

    def _missing(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {name}")
