"""What importing packages of drivetrain loads, in a new interpreter (A-01, A-05, H-02)."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import sys, torch
before = set(sys.modules)

import drivetrain.precision as precision
for name in (64, 32, "bf16", "16", "16-true"):
    precision.resolve_precision(name, torch.device("cpu"))
precision.MixedPrecision("16-mixed", "cuda")
assert not torch.cuda.is_initialized()
loaded = set(sys.modules) - before
others = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"drivetrain", "torch"}
assert not others, others
assert not loaded & {"torch._dynamo", "torch.distributed.tensor"}

import drivetrain.testing
assert not {"pytest", "torch._dynamo"} & set(sys.modules)

import drivetrain.loggers, drivetrain.callbacks
lazy = {"fsspec", "tensorboard", "rich", "drivetrain.loggers.csv_logger", "drivetrain.callbacks.timer"}
assert not lazy & set(sys.modules), lazy & set(sys.modules)
assert "CSVLogger" in dir(drivetrain.loggers) and "Timer" in dir(drivetrain.callbacks)
from drivetrain.loggers import CSVLogger
from drivetrain.callbacks import RichProgressBar
assert not {"tensorboard", "rich"} & set(sys.modules)
try:
    drivetrain.loggers.CvsLogger
except AttributeError as error:
    assert "CvsLogger" in str(error)
else:
    raise AssertionError
"""


def test_importing_a_package_loads_little_and_touches_no_device() -> None:
    # H-02
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower()
