"""Writing predictions: the hooks for writers of one's own, and a writer that a killed run goes on with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain._runtime.transfer import samples_in
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.callbacks._predictions.prediction_run import WritingPredictions
    from drivetrain.run_context import RunContext

_INTERVALS = ("batch", "epoch", "batch_and_epoch")
_FORMATS = ("safetensors",)
_PART_BYTES = 32 * 2**20


class BasePredictionWriter(Callback):
    """Base class of callbacks that write what ``predict_step`` returns. Override one or both of its methods.

    Args:
        write_interval: "batch" calls `write_on_batch_end`, "epoch" `write_on_epoch_end`, "batch_and_epoch" both. For
            the epoch's end this rank's outputs are kept in the host's memory, whatever ``return_predictions`` says.

    Raises:
        ConfigurationError: an unknown interval.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in _INTERVALS:
            raise ConfigurationError(
                f"{type(self).__name__}(write_interval={write_interval!r}).{nearest(str(write_interval), _INTERVALS)}",
                f"the intervals are {', '.join(_INTERVALS)}.",
                "give one of them.",
            )
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
        """Write the output of one micro-batch.

        Args:
            trainer: the run.
            module: what predicts.
            prediction: what ``predict_step`` returned.
            batch_indices: the data-set indices of the samples of the batch on this rank; None where they have none, see
                `RunContext.batch_indices`.
            batch: as the step was given it.
            batch_idx: which micro-batch of this rank's.
            dataloader_idx: of which loader.
        """

    def write_on_epoch_end(
        self, trainer: RunContext, module: Any, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write this rank's outputs of the whole epoch.

        Args:
            trainer: the run.
            module: what predicts.
            predictions: a list of what ``predict_step`` returned, tensors on the CPU; with several loaders a list of
                them for each.
            batch_indices: for each loader, of one too, a list of the data-set indices of each of these batches.
        """

    def on_predict_start(self, trainer: RunContext, module: Any) -> None:
        """Begin with nothing."""
        self._predictions = [[] for _ in trainer.evaluated_loaders]
        self._indices = [[] for _ in trainer.evaluated_loaders]

    def on_predict_batch_end(
        self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Have the output written, or keep it until the epoch's end."""
        indices = trainer.batch_indices
        if self.write_interval != "epoch":
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.write_interval != "batch":
            from drivetrain._loops.outputs import on_host  # by who keeps them

            for kept, one in ((self._predictions, on_host(outputs, fresh_memory=False)), (self._indices, indices)):
                kept.extend([] for _ in range(dataloader_idx + 1 - len(kept)))  # where on_predict_start is overridden
                kept[dataloader_idx].append(one)

    def on_predict_epoch_end(self, trainer: RunContext, module: Any) -> None:
        """Have the epoch's outputs written."""
        predictions, indices = self._predictions, self._indices
        self._predictions, self._indices = [], []
        if self.write_interval != "batch":
            one_loader = len(predictions) == 1
            self.write_on_epoch_end(trainer, module, predictions[0] if one_loader else predictions, indices)


class PredictionWriter(BasePredictionWriter):
    """Writes predictions as they come, from all ranks to one place; `drivetrain.data.read_predictions` reads them.

    They are there for readers once all are written, in one step. Where a run is killed, ``predict`` to the same path
    with the same weights and data goes on: what is written is not written again, and with ``return_predictions=False``
    not computed again. Memory does not grow with the data. See docs/predictions.md.

    Args:
        path: a folder or an fsspec URL that all ranks reach.
        format: "safetensors": tensors as such, and what is no tensor as JSON.
        part_bytes: how many bytes of outputs a rank holds before it writes them; at the latest it does so a minute
            after the first. That much has to be done again after a kill.

    Raises:
        ConfigurationError: an unknown format, or a size that is none.
        CheckpointError: what is at ``path`` has other weights or data, is whole already, or is being written; or
            ``predict_step`` returned what cannot be stored, which the first batch shows.
    """

    def __init__(
        self, path: str | os.PathLike[str], format: str = "safetensors", *, part_bytes: int = _PART_BYTES
    ) -> None:
        super().__init__("batch")
        if format not in _FORMATS:
            raise ConfigurationError(
                f"PredictionWriter(format={format!r}).{nearest(str(format), _FORMATS)}",
                f"the formats are {', '.join(_FORMATS)}.",
                "leave it out; for another one write a BasePredictionWriter.",
            )
        if part_bytes < 1:
            raise ConfigurationError(
                f"PredictionWriter(part_bytes={part_bytes!r}).", "it is a number of bytes.", "give 1 or more."
            )
        self.path = os.fspath(path)
        self.format = format
        self.part_bytes = part_bytes
        self._writing: WritingPredictions | None = None

    @property
    def state_key(self) -> str:
        """The class and the path."""
        return f"{type(self).__qualname__}[{self.path}]"

    def on_predict_start(self, trainer: RunContext, module: Any) -> None:
        """Begin to write, or to go on. Collective."""
        super().on_predict_start(trainer, module)
        from drivetrain.callbacks._predictions.prediction_run import WritingPredictions  # by who predicts

        self._writing = WritingPredictions(self.path, trainer, module, self.part_bytes)

    def predicted_before(
        self, trainer: RunContext, module: Any
    ) -> Callable[[Sequence[Any] | None, int, int], bool] | None:
        """Tell which batches were written by a run that was killed."""
        assert self._writing is not None
        return self._writing.sees if self._writing.goes_on else None

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
        """Take an output, and write it with others where they are enough."""
        if self._writing is not None and trainer.strategy.is_data_leader:
            self._writing.take(prediction, batch_indices, samples_in(batch), batch_idx, dataloader_idx)

    def on_predict_end(self, trainer: RunContext, module: Any) -> None:
        """Publish what all ranks have written. Collective."""
        if self._writing is not None:
            self._writing.publish()
            self._let_go()

    def on_exception(self, trainer: RunContext, module: Any, exception: BaseException) -> None:
        """Keep what was computed, as far as that can be."""
        if self._writing is not None:
            self._writing.save_what_is_held()
            self._let_go()

    def teardown(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Let others write there."""
        self._let_go()

    def _let_go(self) -> None:
        if self._writing is not None:
            self._writing.store.release()
            self._writing = None
