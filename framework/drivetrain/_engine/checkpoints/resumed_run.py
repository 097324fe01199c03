"""ResumedRun: the saved run that a fit goes on with. The fit must have the same parts, and gets their state."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from drivetrain._engine.checkpoints.components import Difference, StartsAnew, differences_from, refuse_differences
from drivetrain._loops.stopping import limit_reached
from drivetrain._loops.trainables import freeze_only
from drivetrain._parameters.loading_hooks import HookedWeights
from drivetrain.callback import EndsRuns
from drivetrain.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_core import RunCore
    from drivetrain._engine.checkpoints.saved_state import SavedState
    from drivetrain._format import CheckpointReader
    from drivetrain._loops.trainables import Trainables

logger = logging.getLogger("drivetrain")


class ResumedRun:
    """The saved run that a fit goes on with. Its methods stand in the order in which a session calls them.

    Args:
        core: the fit.
        saved: loads the state.
        checkpoint: the checkpoint, for which `check_resumable` found no problem.
    """

    def __init__(self, core: RunCore, saved: SavedState, checkpoint: CheckpointReader) -> None:
        self.checkpoint = checkpoint
        self.state: dict[str, Any] = checkpoint.state()
        """The run's document."""
        self._core = core
        self._saved = saved
        self.already_ended: str | None = None
        """Why the run that "auto" found has nothing left to train; None if it can train further."""
        self._accepted: list[Difference] = []  # the differences that `allow` permits
        self._frozen: set[str] = set()  # the parameters that were frozen

    def check_remaining_training(self) -> None:
        """Check whether the limits of the current settings leave anything to train.

        Raises:
            ConfigurationError: nothing is left to train, and ``ckpt_path`` is a path, "last" or "best".
        """
        trainer, progress, ckpt_path = self._core.trainer, self.checkpoint.progress, self._core.request.ckpt_path
        epoch, step = int(progress["epoch"]), int(progress["global_step"])
        reason, remedy = limit_reached(trainer.max_epochs, trainer.max_steps, epoch, step), "raise the limit"
        loop = self.state.get("loop") or {}
        if loop.get("left_after_last_step") and step == trainer.max_steps:
            # The saved run stopped at max_steps, and a validation or the end of the epoch is still to be run.
            reason = limit_reached(trainer.max_epochs, -1, epoch, step)
        if reason is not None and trainer.fast_dev_run:
            remedy = f"leave out fast_dev_run={trainer.fast_dev_run}, which sets this limit"
        elif reason is None and loop.get("asked_to_stop") is None:
            reason, remedy = self._stopped_early(epoch, step), "raise the callback's patience or change its threshold"
        if reason is None or ckpt_path == "auto":
            self.already_ended = reason
            return
        raise ConfigurationError(
            f"ckpt_path={ckpt_path!r}: {reason}, so that nothing is left to train.",
            f"{self.checkpoint.path!r} holds {epoch} epoch(s) and {step} optimizer step(s).",
            f"{remedy}, or evaluate the checkpoint with validate or test. With ckpt_path='auto', fit ends "
            "without training and without this error.",
        )

    def _stopped_early(self, epoch: int, step: int) -> str | None:
        """Return why a callback ended the resumed run, or None.

        A callback whose settings have changed since the resumed run has another state key, and is skipped.
        """
        trainer, states = self._core.trainer, self.state["callbacks"]
        if epoch < (trainer.min_epochs or 0) or step < (trainer.min_steps or 0):
            return None
        for callback in self._core.callbacks:
            key = callback.state_key
            if key not in states or not isinstance(callback, EndsRuns):
                continue
            with self.checkpoint.reading(f"callbacks/{key}"):
                reason = callback.reason_for_ending(states[key])
            if reason is not None:
                return f"{type(callback).__name__} has ended the run: {reason}"
        return None

    def compare(self) -> None:
        """Compare the components that are set up by now with the components of the resumed run. Collective.

        Raises:
            ConfigurationError: components differ, and ``allow`` does not name the difference.
        """
        current, allow, is_rank_0 = self._core.components, self._core.request.allow, self._core.strategy.rank == 0
        if self._core.trainer.reload_dataloaders_every_n_epochs and not self.checkpoint.progress.get("batch_idx"):
            # The next epoch has not begun, so the saved facts describe the loader of the previous epoch.
            current = {name: value for name, value in current.items() if name != "data"}
        found = differences_from(self.checkpoint, self.state, current, self._core.strategy)
        refuse_differences(self.checkpoint.path, found, allow)
        accepted = [difference for difference in found if difference.kind in allow]
        new = [difference for difference in accepted if difference not in self._accepted]
        if new and is_rank_0:
            text = "; ".join(f"{difference.saved}, now {difference.now}" for difference in new)
            logger.warning("These differences from the resumed run are allowed: %s.", text)
        self._accepted = accepted
        kept = [difference for difference in found if difference.kind not in allow]
        if kept and is_rank_0:  # numbers of the checkpoint, which are used instead of this run's
            text = "; ".join(f"{difference.saved}, not {difference.now.partition('=')[2]}" for difference in kept)
            text = f"The checkpoint's value goes on, and not that of configure_optimizers: {text}."
            kinds = ", ".join(f'"{kind}"' for kind in dict.fromkeys(difference.kind for difference in kept))
            logger.warning("%s To start with this run's values: fit(..., allow=(%s,)).", text, kinds)
            self._core.folder.notes.note("kept settings", text, int(self.checkpoint.progress["global_step"]))

    def freeze(self) -> None:
        """Freeze and unfreeze parameters as in the resumed run, before the module is wrapped. Not collective."""
        module, versions = self._core.module, self.checkpoint.manifest.metadata.layer_versions
        self.checkpoint.renames = HookedWeights.of(module, self.checkpoint.weights(), versions, {}).renames
        self.state = self.checkpoint.state()  # with the new names
        with self.checkpoint.reading("trainables"):
            self._frozen = set((self.state.get("trainables") or {"frozen": ()})["frozen"])
        freeze_only(dict(module.named_parameters()), self._frozen)

    def regroup(self, optimizers: Sequence[Optimizer]) -> None:
        """Compare the optimizers, restore their groups, and undo what ``configure_optimizers`` froze or unfroze."""
        self.compare()
        self._trainables.freeze_as_saved(self._frozen, "configure_optimizers")
        self._saved.regroup(self.checkpoint, optimizers, StartsAnew.after(self._accepted))

    def load(self) -> None:
        """Load the state of the resumed run. Collective."""
        with self._core.span("checkpoint"):
            self._saved.load(self.checkpoint, StartsAnew.after(self._accepted))
        self._trainables.resuming = True

    def end(self) -> None:
        """Undo what ``on_fit_start`` and ``on_train_start`` froze or unfroze, and close the checkpoint."""
        self._trainables.freeze_as_saved(self._frozen, "on_fit_start or on_train_start")
        self._trainables.resuming = False
        self.checkpoint.close()  # the run reads nothing more from the checkpoint, which may be deleted from now on
        self.state = {}

    @property
    def _trainables(self) -> Trainables:
        assert self._core.trainables is not None
        return self._core.trainables


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("callbacks", "components", "data"), dict),
    **dict.fromkeys(("callback_hooks", "flattened_optimizer_state", "loop", "schedulers", "trainables"), dict | None),
    **dict.fromkeys(("data/seed", "data/world_size"), int),
}
"""The types of the values in a run's state that are used before their owners load them. A missing value is None."""


def check_saved_state(checkpoint: CheckpointReader) -> None:
    """Check what of a run's state is used before its owners load it.

    Raises:
        CheckpointError: a value is missing, or has another type. The error names the key.
    """
    state = checkpoint.state()
    for path, kind in _TYPES.items():
        with checkpoint.reading(path):
            value = state
            for key in path.split("/"):
                value = value.get(key)
            if not isinstance(value, kind):
                raise TypeError(f"it is {reprlib.repr(value)}")
    with checkpoint.reading("progress"):
        checkpoint.progress["epoch"], checkpoint.progress["global_step"]
    data = state["data"]
    with checkpoint.reading("data"):
        if abs(data["seed"]) >= 2**63 or not 1 <= data["world_size"] <= checkpoint.manifest.world_size:
            raise ValueError(f"it is {reprlib.repr(data)}")


def check_resumable(checkpoint: CheckpointReader, seed: int | None) -> None:
    """Check that training can resume from a checkpoint, with this ``Fit(seed=)``.

    Raises:
        CheckpointError: the checkpoint holds weights only, its state is malformed, or its run had another seed.
    """
    if checkpoint.weights_only:
        raise CheckpointError(
            f"{checkpoint.path!r} holds weights only.",
            "a run cannot resume without its optimizer's state and its progress.",
            "load the weights with load_from_checkpoint, or use a full checkpoint.",
        )
    check_saved_state(checkpoint)
    saved = checkpoint.state()["data"]["seed"]
    if seed is not None and seed != saved:
        raise CheckpointError(
            f"Fit(seed={seed}), and the run of {checkpoint.path!r} had seed={saved}.",
            "the order of samples depends on the seed: samples already used would be used again.",
            "leave seed out: a resumed run takes it from the checkpoint.",
        )
