"""BasePredictionWriter, a base class for custom writers, and PredictionWriter, which can resume after a kill."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain._config.argument_checks import check_choice, check_count, check_types
from drivetrain._runtime.transfer import samples_in
from drivetrain._runtime.working_directory import resolved_path
from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.callbacks._prediction_run import PredictionRun
    from drivetrain.run_context import RunContext

_INTERVALS = ("batch", "epoch", "batch_and_epoch")
_FORMATS = ("safetensors",)
_PART_BYTES = 32 * 2**20


class BasePredictionWriter(Callback):
    """Base class of callbacks that write the outputs of ``predict_step``.

    Subclasses override `write_on_batch_end`, `write_on_epoch_end` or both, matching ``write_interval``. This class
    calls these methods and keeps the outputs.

    Args:
        write_interval: "batch" calls `write_on_batch_end`, "epoch" calls `write_on_epoch_end`, "batch_and_epoch" calls
            both.
            With "epoch" and "batch_and_epoch" this rank's outputs are kept in host memory until the end of the epoch,
            even if ``return_predictions=False``.

    Raises:
        ConfigurationError: ``write_interval`` is unknown.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        check_choice(type(self).__name__, "write_interval", write_interval, _INTERVALS, "when predictions are written")
        self.write_interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Sequence[Any] | None]] = []

    def write_on_batch_end(
        self,
        trainer: RunContext,
        module: Any,
        prediction: Any,
        batch_indices: Sequence[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the output of one micro-batch. The default does nothing.

        Args:
            trainer: the run.
            module: the module that predicts.
            prediction: the output of ``predict_step``.
            batch_indices: the dataset indices of this rank's samples in the batch; None if the samples have no
                indices, as described at `RunContext.batch_indices`.
            batch: the batch as passed to ``predict_step``.
            batch_idx: the number of the micro-batch on this rank.
            dataloader_idx: the number of the loader.
        """

    def write_on_epoch_end(
        self, trainer: RunContext, module: Any, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write this rank's outputs of the whole epoch. The default does nothing.

        Args:
            trainer: the run.
            module: the module that predicts.
            predictions: the outputs of ``predict_step``, with tensors on the CPU; with several loaders, a list of
                outputs per loader.
            batch_indices: one list per loader, even if there is only one, with the dataset indices of each batch.
        """

    def on_predict_start(self, trainer: RunContext, module: Any) -> None:
        """Clear the outputs of an earlier prediction."""
        self._predictions = [[] for _ in trainer.evaluated_loaders]
        self._indices = [[] for _ in trainer.evaluated_loaders]

    def on_predict_batch_end(
        self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write the output, or keep the output until the end of the epoch."""
        indices = trainer.batch_indices
        if self.write_interval != "epoch":
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.write_interval != "batch":
            from drivetrain._loops.outputs import on_host  # Imported only if outputs are kept.

            self._predictions[dataloader_idx].append(on_host(outputs, fresh_memory=False))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: RunContext, module: Any) -> None:
        """Write the outputs of the epoch."""
        predictions, indices = self._predictions, self._indices
        self._predictions, self._indices = [], []
        if self.write_interval != "batch":
            has_one_loader = len(predictions) == 1
            self.write_on_epoch_end(trainer, module, predictions[0] if has_one_loader else predictions, indices)


class PredictionWriter(BasePredictionWriter):
    """Writes the predictions of all ranks to one folder while predicting. `data.read_predictions` reads the folder.

    The predictions are published in one step once all of them are written. If the run is killed, calling ``predict``
    with the same path, weights, data, batches and number of ranks resumes the killed run. Batches that were written are
    not written again.
    With ``return_predictions=False`` they are also not computed again. Memory use does not grow with the data. See
    docs/predictions.md.

    Args:
        path: a folder or fsspec URL that all ranks can access.
        format: "safetensors" writes tensors as safetensors files and other values as JSON.
        part_bytes: bytes of outputs that a rank buffers before writing one part. A part is also written a minute after
            its first output. Outputs in the buffer are lost if the run is killed. The resumed run predicts
            them again.

    Raises:
        ConfigurationError: ``format`` or ``part_bytes`` is invalid.
        CheckpointError: the predictions at ``path`` are from other weights, data, batches or another number of ranks,
            are complete, or are being written by another run; or ``predict_step`` returned a value that cannot be
            stored (raised at the first batch).
    """

    _key_arguments = ("path",)

    def __init__(
        self, path: str | os.PathLike[str], format: str = "safetensors", *, part_bytes: int = _PART_BYTES
    ) -> None:
        check_types(PredictionWriter, locals())
        super().__init__("batch")
        meaning = "the format of the files; a subclass of BasePredictionWriter may write others"
        check_choice("PredictionWriter", "format", format, _FORMATS, meaning)
        check_count("PredictionWriter", "part_bytes", part_bytes, 1, "a number of bytes")
        self.path = resolved_path(path, "path")
        self.format = format
        self.part_bytes = part_bytes
        self._run: PredictionRun | None = None

    def on_predict_start(self, trainer: RunContext, module: Any) -> None:
        """Start to write predictions, or continue those of a killed run. A collective operation."""
        super().on_predict_start(trainer, module)
        from drivetrain.callbacks._prediction_run import PredictionRun  # imported only if needed

        self._run = PredictionRun(self.path, trainer, module, self.part_bytes)

    def existing_predictions(self, trainer: RunContext, module: Any) -> Callable[[int, int], bool] | None:
        """Return a function that returns whether a killed run has written a batch; None if no killed run is resumed."""
        assert self._run is not None
        return self._run.is_written if self._run.resumes else None

    def write_on_batch_end(
        self,
        trainer: RunContext,
        module: Any,
        prediction: Any,
        batch_indices: Sequence[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Buffer an output, and write the buffer as a part if it is large enough."""
        if self._run is not None and trainer.strategy.is_data_leader:
            self._run.add(prediction, batch_indices, samples_in(batch), batch_idx, dataloader_idx)

    def on_predict_end(self, trainer: RunContext, module: Any) -> None:
        """Publish the predictions of all ranks. A collective operation."""
        if self._run is not None:
            self._run.publish()
            self._release()

    def on_exception(self, trainer: RunContext, module: Any, exception: BaseException) -> None:
        """Write the outputs in the buffer, if possible."""
        if self._run is not None:
            self._run.flush_after_failure()
            self._release()

    def teardown(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Release the folder for other runs."""
        self._release()

    def _release(self) -> None:
        if self._run is not None:
            self._run.store.release()
            self._run = None
