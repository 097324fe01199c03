"""Whether a checkpoint fits what is to be loaded from it: said before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain._engine.saved_state_schema import check_progress, check_state
from drivetrain.checkpoint._weights_fit import WeightMismatch
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.checkpoint._format import Checkpoint


def check_weights_fit(checkpoint: Checkpoint, own: Mapping[str, Any], module: str, strict: bool = True) -> None:
    """Refuse weights that are not ``own`` by name and shape; if not ``strict``, say which names are skipped.

    Raises:
        CheckpointError: lists what is missing, what is unexpected and what has another shape.
    """
    weights = checkpoint.weights()
    saved = {**dict.fromkeys(weights), **weights.sources()}
    WeightMismatch.compare(own, saved).raise_or_warn(
        f"The weights of {checkpoint.path!r}",
        module,
        strict,
        remedy="set strict_loading = False in the module, or use load_from_checkpoint(path, strict=False),",
    )


def check_optimizers_fit(checkpoint: Checkpoint, optimizers: int | None, schedulers: int | None) -> None:
    """Refuse a checkpoint of a run with another number of optimizers or schedulers; None stands for any.

    Raises:
        CheckpointError: names both numbers.
    """
    state = checkpoint.state()
    for what, saved, here in (
        ("optimizer(s)", len(checkpoint.manifest.optimizers), optimizers),
        ("learning-rate scheduler(s)", len(state["schedulers"]), schedulers),
    ):
        if here is not None and saved != here:
            raise CheckpointError(
                f"{checkpoint.path!r} holds the state of {saved} {what}, and configure_optimizers returned {here}.",
                "states are matched by their order.",
                "return the same ones, or start from the weights alone with load_from_checkpoint.",
            )


def check_form(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is malformed in what it says of its run.

    Raises:
        CheckpointError: names the file and the key.
    """
    check_progress(checkpoint)
    check_state(checkpoint)


def check_goes_on(checkpoint: Checkpoint, seed: int | None) -> None:
    """Refuse what training cannot go on from, or not with this ``Fit(seed=)``.

    Raises:
        CheckpointError: it holds weights only, what it says of its run is malformed, or that run had another seed.
    """
    if checkpoint.weights_only:
        raise CheckpointError(
            f"{checkpoint.path!r} holds weights only.",
            "a run cannot go on without its optimizer's state and its progress.",
            "load the weights with load_from_checkpoint, or take a whole checkpoint.",
        )
    check_form(checkpoint)
    saved = checkpoint.state()["data"]["seed"]
    if seed is not None and seed != saved:
        raise CheckpointError(
            f"Fit(seed={seed}), and the run of {checkpoint.path!r} had seed={saved}.",
            "the order of samples follows from it: what was seen would be seen again.",
            "leave seed out: a run takes it from the checkpoint.",
        )
