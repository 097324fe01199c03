"""DataModule: where the data comes from, apart from the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Self

import torch

from drivetrain._runtime.transfer import move_to
from drivetrain.module._hyper_parameters import HyperParametersMixin
from drivetrain.module._run_handle import RunHandle


class DataModule(RunHandle, HyperParametersMixin):
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

    def on_exception(self, exception: BaseException) -> None:
        """Called when anything inside the run raised; the exception goes on afterwards."""

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

    # Made from what there is

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **arguments: Any,
    ) -> Self:
        """Return a data module of loaders over data sets; training's shuffles, unless its data set is iterable.

        Args:
            train_dataset: the training data set; several as a list or a dict, of which each gets a loader.
            val_dataset: one validation data set, or a list of them.
            test_dataset: one test data set, or a list of them.
            predict_dataset: one data set to predict on, or a list of them.
            batch_size: samples of a micro-batch, on each rank.
            num_workers: worker processes of each loader.
            arguments: for the class's ``__init__``.
        """
        made = cls(**arguments)
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for kind, datasets in given.items():
            if datasets is not None:
                how = {"batch_size": batch_size, "num_workers": num_workers}
                setattr(made, f"{kind}_dataloader", partial(_loaders, datasets, kind == "train", how))
        return made

    @classmethod
    def load_from_checkpoint(
        cls,
        path: Any = None,
        *,
        checkpoint_path: Any = None,
        map_location: Any = None,
        hparams_file: Any = None,
        ignore: str | Iterable[str] = (),
        **overrides: Any,
    ) -> Self:
        """Build the data module from the hyper-parameters that it kept in a checkpoint, and give it its state.

        Args:
            path: the checkpoint's path or URL.
            checkpoint_path: the same, by Lightning's name.
            map_location: the device to put the tensors of its state on.
            hparams_file: a file of hyper-parameters, JSON or YAML, that counts instead of the checkpoint's.
            ignore: names of saved hyper-parameters to leave out, which ``__init__`` takes no longer.
            overrides: hyper-parameters that replace the saved ones, or that were left out, being secrets.

        Raises:
            CheckpointError: there is no whole checkpoint, or ``__init__`` needs what its hyper-parameters do not hold,
                or does not take what they hold.
        """
        from drivetrain.checkpoint._format import load  # a run that begins afresh has no use for these
        from drivetrain.module._saved_arguments import SavedArguments, path_of, read_hyper_parameters

        path = path_of(cls, path, checkpoint_path)
        checkpoint = load(path)
        facts = checkpoint.manifest.facts
        kept = facts.data_hyper_parameters if hparams_file is None else read_hyper_parameters(hparams_file)
        built = SavedArguments(os.fspath(path), kept, (), facts.data_argument).build(cls, overrides, ignore)
        state = {} if facts.weights_only else checkpoint.state()["datamodule"]
        if state:
            built.load_state_dict(state if map_location is None else move_to(state, torch.device(map_location)))
        return built

    def _missing(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {name}")


def _loaders(datasets: Any, shuffle: bool, how: Mapping[str, Any]) -> Any:
    from torch.utils.data import DataLoader, IterableDataset  # with all of its workers

    if isinstance(datasets, Mapping):
        return {name: _loaders(one, shuffle, how) for name, one in datasets.items()}
    if isinstance(datasets, list | tuple):
        return [_loaders(one, shuffle, how) for one in datasets]
    return DataLoader(datasets, shuffle=shuffle and not isinstance(datasets, IterableDataset), **how)
