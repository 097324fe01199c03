"""The data of a task, separate from the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Self

import torch

from drivetrain._module.hyper_parameters import HyperParametersMixin, class_only
from drivetrain._module.run_handle import RunHandle
from drivetrain._runtime.transfer import move_to


class DataModule(RunHandle, HyperParametersMixin):
    """Prepares the data of a task and builds its loaders.

    Implement `prepare_data` and `setup`, and a loader method for each stage that you run. Return ordinary loaders,
    which are sharded over the ranks automatically.
    """

    def prepare_data(self) -> None:
        """Download and write files. Called in one process per node, before `setup`; do not set state here."""

    def setup(self, stage: str) -> None:
        """Build the data sets in every process; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up in every process, even after a failure."""

    def on_exception(self, exception: BaseException) -> None:
        """Respond to an exception in the run, which is re-raised afterwards."""

    def train_dataloader(self) -> Any:
        """Return the training loader, or a dict, list or `CombinedLoader` of loaders."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return one validation loader or a list of them."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return one test loader or a list of them."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return one loader to predict on, or a list of them."""
        raise NotImplementedError

    # Hooks that transform batches and move them to the device

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Transform a batch of the loader, before it is moved to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device."""
        return move_to(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Transform a batch on the device."""
        return batch

    # State in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this data module for a checkpoint: JSON-able values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    # Alternative constructors

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
        """Return a data module with a loader for each data set. The training data is shuffled, unless it is iterable.

        Args:
            train_dataset: the training data set, or a list or dict of training data sets.
            val_dataset: one validation data set, or a list of validation data sets.
            test_dataset: one test data set, or a list of test data sets.
            predict_dataset: one data set to predict on, or a list of such data sets.
            batch_size: samples per micro-batch on each rank.
            num_workers: worker processes of each loader.
            arguments: the arguments of the class's ``__init__``.
        """
        datamodule = cls(**arguments)
        datasets_by_stage = {
            "train": train_dataset,
            "val": val_dataset,
            "test": test_dataset,
            "predict": predict_dataset,
        }
        for stage, datasets in datasets_by_stage.items():
            if datasets is not None:
                options = {"batch_size": batch_size, "num_workers": num_workers}
                setattr(datamodule, f"{stage}_dataloader", partial(_loaders_of, datasets, stage == "train", options))
        return datamodule

    @class_only
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
        """Build the data module from the hyper-parameters in a checkpoint, and restore its state.

        Args:
            path: the checkpoint's path or URL.
            checkpoint_path: Lightning's name for ``path``.
            map_location: the device for the tensors of the state.
            hparams_file: a JSON or YAML file of hyper-parameters, used instead of those in the checkpoint.
            ignore: names of saved hyper-parameters to omit because ``__init__`` no longer takes them.
            overrides: hyper-parameters that replace the saved values, and secrets, which checkpoints do not contain.

        Raises:
            CheckpointError: there is no complete checkpoint, or its hyper-parameters do not match the arguments of
                ``__init__``.
        """
        from drivetrain._format import load  # imported only here, because most runs do not need it
        from drivetrain._module.saved_arguments import SavedArguments, read_hyper_parameters, resolve_checkpoint_path

        path = resolve_checkpoint_path(cls, path, checkpoint_path)
        checkpoint = load(path)
        metadata = checkpoint.manifest.metadata
        hyper_parameters = (
            metadata.data_hyper_parameters if hparams_file is None else read_hyper_parameters(hparams_file)
        )
        datamodule = SavedArguments(os.fspath(path), hyper_parameters, metadata.data_argument).build(
            cls, overrides, ignore
        )
        state = {} if metadata.weights_only else checkpoint.state()["datamodule"]
        if state:
            datamodule.load_state_dict(state if map_location is None else move_to(state, torch.device(map_location)))
        return datamodule


def _loaders_of(datasets: Any, shuffle: bool, options: Mapping[str, Any]) -> Any:
    from torch.utils.data import DataLoader, IterableDataset  # imported only here, because the import is slow

    if isinstance(datasets, Mapping):
        return {name: _loaders_of(dataset, shuffle, options) for name, dataset in datasets.items()}
    if isinstance(datasets, list | tuple):
        return [_loaders_of(dataset, shuffle, options) for dataset in datasets]
    return DataLoader(datasets, shuffle=shuffle and not isinstance(datasets, IterableDataset), **options)
