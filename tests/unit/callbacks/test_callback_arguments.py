"""Arguments of all callbacks: wrong ones are refused by name, and different ones give different state keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from drivetrain import ConfigurationError, callbacks

INVALID = "is not a valid name"
SCHEDULES: list[Any] = [{}, {-1: 2}, {0: 0}, {0: 1.5}, {"0": 1}, {True: 2}]
NAMES = [
    "",
    "a/b",
    "{epoch",
    ".hidden",
    "a\0b",
    "a\nb",
    "x" * 300,
    "é" * 255,
    "{val_loss:0300.2f}",
    "{" + "v" * 250 + "}",
]
FILES = ["latest", "Latest", "manifest.json", "state.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("BasePredictionWriter", {"write_interval": "batches"}, "Did you mean 'batch'"),
        ("Checkpoint", {"mode": "mn"}, "mode='mn'.*min"),
        ("Checkpoint", {"save_top_k": -2}, "save_top_k=-2"),
        ("Checkpoint", {"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ("Checkpoint", {"keep_last": True}, "keep_last=True"),
        ("Checkpoint", {"train_time_interval": 30}, "train_time_interval=30"),
        *(("Checkpoint", {"filename": name}, INVALID) for name in (*NAMES, *FILES)),
        ("Checkpoint", {"filename": "{val_loss:.>9}", "auto_insert_metric_name": False}, INVALID),
        ("Checkpoint", {"filename": "{epoch:s}"}, "cannot be formatted as 's'"),
        *(("EarlyStopping", {"monitor": "a", "patience": patience}, f"patience={patience}") for patience in (-1, True)),
        ("EarlyStopping", {"monitor": "a", "mode": "mni"}, "mode='mni'"),
        *(("EMAWeightAveraging", {"decay": decay}, "decay=") for decay in (1.5, -0.1, float("nan"))),
        *(("EMAWeightAveraging", {"update_every_n_steps": steps}, "update_every_n_steps=") for steps in (0, 1.5)),
        ("EMAWeightAveraging", {"update_starting_at_step": -1}, "update_starting_at_step="),
        ("EMAWeightAveraging", {"update_starting_at_epoch": "2"}, "update_starting_at_epoch="),
        ("GarbageCollection", {"every_n_steps": 0}, "every_n_steps=0"),
        *(("GradientAccumulationScheduler", {"scheduling": each}, "Scheduler") for each in SCHEDULES),
        ("LambdaCallback", {"on_train_epoch_ends": print}, "Did you mean 'on_train_epoch_end'"),
        ("LambdaCallback", {"on_fit_end": "print"}, "not a function"),
        ("LearningRateMonitor", {"logging_interval": "steps"}, "Did you mean 'step'"),
        ("LossSpikeGuard", {"action": "rolback"}, r"action='rolback'\)\. Did you mean 'rollback'"),
        ("LossSpikeGuard", {"every_n_steps": 0}, "every_n_steps=0"),
        ("LossSpikeGuard", {"threshold": 0}, "threshold=0"),
        ("LossSpikeGuard", {"window": 4, "warmup": 5}, "warmup=5"),
        *(("ModelSummary", {"max_depth": depth}, f"max_depth={depth!r}") for depth in (-2, 1.5, "all")),
        ("NonFiniteGuard", {"every_n_steps": 0}, "every_n_steps=0"),
        ("PredictionWriter", {"path": "out", "format": "safetensor"}, "Did you mean 'safetensors'"),
        ("PredictionWriter", {"path": "out", "part_bytes": 0}, "bytes"),
        *(("ProgressBar", {"refresh_rate": rate}, "refresh_rate") for rate in (0, -1, 11)),
        ("ReplicaCheck", {"every_n_steps": 0}, "every_n_steps=0"),
        *(("ThroughputMonitor", {name: -1}, name) for name in ("window", "peak_flops", "flops")),
        ("ThroughputMonitor", {"window": 0}, "window"),
        *(("Timer", {"duration": given}, "duration=") for given in ("12:00", "a:b:c:d", {"hour": 1}, timedelta(-1))),
        ("Timer", {"interval": "steps"}, "interval='steps'"),
        ("WeightAveraging", {"avg_fn": 0.9}, r"WeightAveraging\(avg_fn=0.9\)"),
    ],
)
def test_bad_arguments_are_refused(name: str, options: dict[str, Any], message: str) -> None:  # G-06, L-01, L-03
    with pytest.raises(ConfigurationError, match=message):
        getattr(callbacks, name)(**options)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("EarlyStopping", [("a",), ("b",), ("a", 0.1), ("a", 0.0, 4), ("a", 0.0, 3, False, "max")]),
        ("GradientAccumulationScheduler", [({0: 2},), ({0: 3},)]),
        ("LearningRateMonitor", [("step",), ("epoch",)]),
        ("ModelSummary", [(1,), (2,)]),
        ("NonFiniteGuard", [(), (2,)]),
        ("ReplicaCheck", [(), (100, False)]),
        ("Timer", [(), ("00:01:00:00",), (None, "epoch")]),
    ],
)
def test_different_arguments_have_different_state_keys(name: str, arguments: list[tuple[Any, ...]]) -> None:  # F-12
    keys, again = ([getattr(callbacks, name)(*each).state_key for each in arguments] for _ in range(2))
    assert len(set(keys)) == len(arguments)
    assert keys == again
