"""Checks of the arguments of `Checkpoint`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from drivetrain.errors import ConfigurationError, nearest

_MODES = ("min", "max")


def check_monitor(monitor: Any, mode: str) -> None:
    if monitor is not None and not isinstance(monitor, str):
        raise ConfigurationError(
            f"Checkpoint(monitor={monitor!r}).",
            "monitor is the name of a logged value.",
            "give a name, such as 'val_loss', or None to keep the newest checkpoint.",
        )
    if monitor is None and mode == "max":
        raise ConfigurationError(
            "Checkpoint(mode='max') without a monitor.",
            "without a monitored value the newest checkpoint is kept, whatever the mode.",
            "set monitor= to the name of a logged value, or remove mode.",
        )


def check_arguments(mode: str, top_k: int, keep_last: int | None, steps: Any, epochs: Any, interval: Any) -> None:
    if mode not in _MODES:
        raise ConfigurationError(
            f"Checkpoint(mode={mode!r}).{nearest(str(mode), _MODES)}",
            "mode is the direction in which the monitored value improves",
            "give 'min' or 'max'",
        )
    for name, value, least in (
        ("save_top_k", top_k, -1),
        ("keep_last", keep_last, 0),
        ("every_n_train_steps", steps, 0),
        ("every_n_epochs", epochs, 0),
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigurationError(
                f"Checkpoint({name}={value!r}).", f"{name} is an integer, {least} or more.", f"give at least {least}."
            )
    if interval is not None and (not isinstance(interval, timedelta) or interval <= timedelta(0)):
        raise ConfigurationError(
            f"Checkpoint(train_time_interval={interval!r}).",
            "train_time_interval is the time between two checkpoints.",
            "give a datetime.timedelta, such as timedelta(minutes=30).",
        )
