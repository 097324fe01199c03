"""Checks that a checkpoint fits the module, optimizers and seed of a run, before anything is loaded from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain._engine.saved_state_schema import check_progress, check_state
from drivetrain.checkpoint._weights_fit import WeightMismatch
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.checkpoint._format import CheckpointReader, Weights


def check_weights_fit(path: str, weights: Weights, own: Mapping[str, Any], module: str, strict: bool = True) -> None:
    """Compare the names and shapes of the saved weights with the module's.

    Args:
        path: the path of the checkpoint, for the error.
        weights: the saved weights.
        own: the module's weights by name.
        module: the module's class name, for the error.
        strict: whether missing and unexpected names are an error. Otherwise such names are logged and skipped.

    Raises:
        CheckpointError: names are missing or unexpected, or shapes differ. The error lists these names.
    """
    WeightMismatch.compare(own, {name: weights.stored(name) for name in weights}).raise_or_warn(
        f"The weights of {path!r}",
        module,
        strict,
        remedy="set strict_loading = False in the module, or use load_from_checkpoint(path, strict=False),",
    )


def check_optimizers_fit(checkpoint: CheckpointReader, optimizers: int | None, schedulers: int | None) -> None:
    """Check that the number of saved optimizers and schedulers equals the given numbers; None accepts any number.

    Raises:
        CheckpointError: a number differs. The error states the saved and the given number.
    """
    state = checkpoint.state()
    for kind, saved, configured in (
        ("optimizer(s)", len(checkpoint.manifest.optimizers), optimizers),
        ("learning-rate scheduler(s)", len(state["schedulers"]), schedulers),
    ):
        if configured is not None and saved != configured:
            raise CheckpointError(
                f"{checkpoint.path!r} holds the state of {saved} {kind}, and configure_optimizers returned "
                f"{configured}.",
                "the saved states are assigned to optimizers and schedulers by their order.",
                "return as many as in the saved run, or start from the weights alone with load_from_checkpoint.",
            )


def check_saved_state(checkpoint: CheckpointReader) -> None:
    """Check that the progress and the run's state in a checkpoint are well-formed.

    Raises:
        CheckpointError: the state is malformed. The error names the file and the key.
    """
    check_progress(checkpoint)
    check_state(checkpoint)


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
