"""ModuleHooks: the hooks that a module may override, called at the same points as the hooks of a `Callback`."""

from __future__ import annotations

from typing import Any

import torch


class ModuleHooks:
    """Empty hooks. The loops call only hooks that a subclass overrides."""

    # Setup, teardown, failures and checkpoints

    def prepare_data(self) -> None:
        """Download or unpack data. Called before `setup` in one process per node, so do not set attributes here."""

    def setup(self, stage: str) -> None:
        """Called on every rank before the loaders are built. ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called at the end of a run, also after a failure."""

    def configure_model(self) -> None:
        """Build or replace layers under the strategy's device and dtype contexts.

        Called in every run, possibly several times for one module, so it must be idempotent.
        """

    def configure_callbacks(self) -> Any:
        """Return a callback, or a list of callbacks, to add to the callbacks of the run."""
        return []

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run raised an exception, which is re-raised afterwards."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add JSON-serializable values or tensors to ``checkpoint``, a dict that only this module uses."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` added."""

    # Training

    def on_fit_start(self) -> None:
        """Called once the module and optimizers are set up, before the sanity validation."""

    def on_fit_end(self) -> None:
        """Called after training, before `teardown`."""

    def on_train_start(self) -> None:
        """Called before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before an epoch's first micro-batch."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch's last micro-batch and validation, after epoch metrics have been reduced."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a micro-batch. Returning -1 on every rank skips the rest of the epoch."""

    def on_train_batch_end(self, outputs: dict[str, Any], batch: Any, batch_idx: int) -> None:
        """Called after a micro-batch. ``outputs["loss"]`` is detached and unscaled."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a window's gradients are cleared."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Called before each backward, with the loss that `training_step` returned."""

    def on_after_backward(self) -> None:
        """Called after every backward."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before clipping and the optimizer step, with unscaled gradients."""

    # Batches

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Transform a batch of the loader before the batch is moved to the device."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Transform a batch on the device."""
        return batch

    # Evaluation

    def on_validation_start(self) -> None:
        """Called before a validation run."""

    def on_validation_end(self) -> None:
        """Called after a validation run, when its metrics are reduced."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation micro-batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation micro-batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a validation micro-batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a validation micro-batch, with what `validation_step` returned."""

    def on_test_start(self) -> None:
        """Called before a test run."""

    def on_test_end(self) -> None:
        """Called after a test run, when its metrics are reduced."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test micro-batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test micro-batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a test micro-batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a test micro-batch, with what `test_step` returned."""

    def on_predict_start(self) -> None:
        """Called before a prediction run."""

    def on_predict_end(self) -> None:
        """Called after a prediction run."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first prediction micro-batch."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last prediction micro-batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a prediction micro-batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a prediction micro-batch, with what `predict_step` returned."""

    # Modes of the layers

    def on_validation_model_eval(self: Any) -> None:
        """Set the modes (train or eval) for validation; by default eval for every layer."""
        self.eval()

    def on_validation_model_train(self: Any) -> None:
        """Set the modes after validation. Without an override, every layer gets the mode from before."""
        self.train()

    def on_test_model_eval(self: Any) -> None:
        """Set the modes (train or eval) for a test; by default eval for every layer."""
        self.eval()

    def on_test_model_train(self: Any) -> None:
        """Set the modes after a test. Without an override, every layer gets the mode from before."""
        self.train()

    def on_predict_model_eval(self: Any) -> None:
        """Set the modes (train or eval) for a prediction; by default eval for every layer."""
        self.eval()

    def on_predict_model_train(self: Any) -> None:
        """Set the modes after a prediction. Without an override, every layer gets the mode from before."""
        self.train()
