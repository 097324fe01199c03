"""Chooses between the trained weights and the averages of a checkpoint that has both."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from drivetrain._format import CheckpointReader, Weights, load
from drivetrain._runtime.console import log_to_console
from drivetrain.errors import ConfigurationError, listed

logger = logging.getLogger("drivetrain")


def evaluated_weights(
    checkpoint: CheckpointReader | str | os.PathLike[str], averaged: bool | None = None, announce: bool = True
) -> Weights:
    """Return the weights to evaluate, load or export. If the checkpoint has averages, a message says which are used.

    Args:
        checkpoint: the checkpoint, or its path or fsspec URL.
        averaged: True for the averages, False for the trained weights, None for those that the run evaluated with.
        announce: whether to log the message; False on ranks other than 0.

    Raises:
        ConfigurationError: ``averaged`` has another value.
        CheckpointError: ``averaged`` is True and the checkpoint has no averages.
    """
    check_averaged(averaged)
    if not isinstance(checkpoint, CheckpointReader):
        checkpoint = load(checkpoint)
    record = checkpoint.manifest.metadata.averages
    if record is None:
        return checkpoint.averages() if averaged else checkpoint.weights()  # `averages` raises the error
    uses_averages = record.evaluated if averaged is None else averaged
    if announce:
        announce_choice(checkpoint.path, uses_averages, is_default=averaged is None)
    return checkpoint.averages() if uses_averages else checkpoint.weights()


def announce_choice(path: str, uses_averages: bool, is_default: bool) -> None:
    """Log which weights of the checkpoint at ``path``, which has trained weights and averages, are used."""
    used, others = ("averages", "trained weights") if uses_averages else ("trained weights", "averages")
    with log_to_console(True):
        logger.info(
            "%r has trained weights and averages: the %s are used%s; averaged=%s chooses the %s.",
            path,
            used,
            ", with which the run evaluated" if is_default else "",
            not uses_averages,
            others,
        )


def check_averaged(averaged: Any) -> None:
    """Check the value of an argument ``averaged``.

    Raises:
        ConfigurationError: the value is not True, False or None.
    """
    if averaged is not None and not isinstance(averaged, bool):
        raise ConfigurationError(
            f"averaged={averaged!r}.",
            "averaged chooses which weights of a checkpoint to use.",
            "give True for the averages, False for the trained weights, or None for those that the run evaluated with.",
        )


def check_averages(name: str, tensors: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Check the averages of a callback of class ``name``, before a checkpoint records them.

    Raises:
        ConfigurationError: no tensor has the name of a weight.
    """
    if tensors.keys().isdisjoint(weights):
        raise ConfigurationError(
            f"{name}.save_tensors returns averages, and none of their names is that of a weight: "
            f"{listed(sorted(tensors))}.",
            "the checkpoint would be evaluated without the averages.",
            "return the averages under the names in state_dict of the module, or return None from evaluates_averages.",
        )
