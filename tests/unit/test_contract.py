"""The names that the documentation promises exist at the promised place, in whichever file they are defined."""

from __future__ import annotations

import importlib

import pytest

PROMISED = {
    "drivetrain": [
        *("Fit", "TrainModule", "Callback", "DataModule", "Strategy", "Precision", "Logger", "RunContext"),
        *("seed_everything", "DrivetrainError", "ConfigurationError", "CheckpointError", "DistributedError"),
        *("NonFiniteError", "LossSpikeError", "callbacks", "loggers", "precision", "data", "checkpoint"),
        *("environments", "launchers", "profilers", "strategies", "testing", "tuner"),
    ],
    "drivetrain.callbacks": [
        *(
            "BatchSizeFinder",
            "LearningRateFinder",
            "Checkpoint",
            "EarlyStopping",
            "GarbageCollection",
            "GradientAccumulationScheduler",
            "LambdaCallback",
        ),
        *("LearningRateMonitor", "LossSpikeGuard", "ModelSummary", "NonFiniteGuard", "ProgressBar", "ReplicaCheck"),
        *("RichProgressBar", "ThroughputMonitor", "Timer"),
    ],
    "drivetrain.checkpoint": ["Checkpoint", "consolidate", "convert", "load", "show", "verify"],
    "drivetrain.data": ["CombinedLoader", "DataModule", "KeyedPermutation", "order", "split_by_rank"],
    "drivetrain.environments": [
        *("Environment", "KubeflowEnvironment", "LSFEnvironment", "MPIEnvironment", "Placement", "PlainEnvironment"),
        *("SlurmEnvironment", "TorchrunEnvironment", "detect_environment"),
    ],
    "drivetrain.launchers": [
        *(
            "Devices",
            "FunctionLauncher",
            "Launcher",
            "RayLauncher",
            "SubprocessLauncher",
            "Work",
            "World",
            "torchrun_variables",
        ),
    ],
    "drivetrain.profilers": [
        *("AdvancedProfiler", "PassThroughProfiler", "PhaseRow", "ProfiledRun", "Profiler", "PyTorchProfiler"),
        "SimpleProfiler",
    ],
    "drivetrain.loggers": ["CSVLogger", "Histogram", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"],
    "drivetrain.precision": [
        *("DoublePrecision", "FullPrecision", "HalfPrecision", "MixedPrecision", "Precision", "resolve_precision"),
    ],
    "drivetrain.strategies": [
        *("DistributedStrategy", "MemoryAdvice", "ParameterShard", "RunSettings", "StepRunner", "Strategy"),
        *("known_strategies", "strategy_by_name"),
    ],
    "drivetrain.testing": [
        *("World", "assert_close_states", "assert_close_traces", "assert_equal_ranks", "run_distributed"),
        *("requires_command", "requires_cuda", "requires_linux", "requires_mps", "requires_package"),
    ],
    "drivetrain.tuner": ["LRFind", "Tuner"],
    "drivetrain_strategies": ["DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "SingleDeviceStrategy"],
}


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_exist(module: str) -> None:
    found = importlib.import_module(module)
    missing = [name for name in PROMISED[module] if not hasattr(found, name)]
    assert not missing
    assert not set(PROMISED[module]) - set(found.__all__), "in __all__ too, for `import *` and editors"
