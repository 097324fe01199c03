"""Process-wide settings: those that a run changes are restored afterwards (A-03), and the seed of all generators."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import ConfigurationError, Fit, seed_everything
from drivetrain._runtime.seed import derive_seed
from drivetrain.callbacks import LambdaCallback
from one_layer import OneLayer

QUIET: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "barebones": True}


def run(change: Callable[[], Any], **options: Any) -> None:
    """Run a fit that calls ``change`` at its end."""
    with torch.random.fork_rng():
        module = OneLayer()
    fit = Fit(callbacks=LambdaCallback(on_fit_end=lambda *_: change()), **QUIET, **options)
    fit.fit(module, DataLoader(torch.ones(2, 2)))  # type: ignore[arg-type]


def _change_environment() -> None:
    os.environ["PATH"] = "/nowhere"
    os.environ["DRIVETRAIN_TEST_NEW"] = "1"
    del os.environ["HOME"]


def _attribute(owner: Any, name: str, value: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    return (lambda: getattr(owner, name)), (lambda: setattr(owner, name, value))


CUDNN: Any = torch.backends.cudnn
MKLDNN: Any = torch.backends.mkldnn
FIELDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {  # how to read and how to change each
    "environment": (lambda: dict(os.environ), _change_environment),
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "cudnn.enabled": _attribute(CUDNN, "enabled", False),
    "cudnn.benchmark": _attribute(CUDNN, "benchmark", True),
    "cudnn.deterministic": _attribute(CUDNN, "deterministic", True),
    "cudnn.allow_tf32": _attribute(CUDNN, "allow_tf32", False),
    "fp32_precision": _attribute(torch.backends, "fp32_precision", "tf32"),
    "cudnn.conv": _attribute(CUDNN.conv, "fp32_precision", "ieee"),
    "matmul": _attribute(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "mkldnn.matmul": _attribute(MKLDNN.matmul, "fp32_precision", "bf16"),
    "matmul precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "deterministic": (torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("error")),
    "deterministic, warning": (torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("warn")),
    "filling memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "grad mode": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "SIGUSR1": (lambda: signal.getsignal(signal.SIGUSR1), lambda: signal.signal(signal.SIGUSR1, lambda *_: None)),
    "SIGTERM": (lambda: signal.getsignal(signal.SIGTERM), lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)),
    "sys.excepthook": _attribute(sys, "excepthook", lambda *_: None),
    "threading.excepthook": _attribute(threading, "excepthook", lambda *_: None),
    "python generator": (random.getstate, random.random),
    "numpy generator": (lambda: str(numpy.random.get_state()), numpy.random.rand),
    "torch generator": (lambda: torch.get_rng_state().tolist(), lambda: torch.rand(3)),
}


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_restored(field: str) -> None:
    read, change = FIELDS[field]
    values = [read()]

    def change_and_read() -> None:
        values.append(read())
        change()
        values.append(read())

    run(change_and_read, seed=0)
    before, within, changed = values
    assert changed != within
    assert read() == before


def test_everything_is_restored_after_an_exception() -> None:
    def change_everything_and_raise() -> None:
        for _, change in FIELDS.values():
            change()
        raise RuntimeError("from inside")

    before = {name: read() for name, (read, _) in FIELDS.items()}
    with pytest.raises(RuntimeError, match="from inside"):
        run(change_everything_and_raise, seed=0)
    assert {name: read() for name, (read, _) in FIELDS.items()} == before


def test_the_compilers_deterministic_flag_is_restored() -> None:
    run(lambda: __import__("torch._inductor.config"))  # importing the compiler sets variables
    config = sys.modules["torch._inductor.config"]
    within: list[bool] = []
    run(lambda: within.append(config.deterministic), deterministic=True)
    assert within == [True]
    assert not config.deterministic
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_without_a_seed_draws_from_the_generators_of_the_process() -> None:
    states: list[Any] = []
    run(lambda: states.extend([torch.rand(()), torch.get_rng_state(), random.random(), random.getstate()]))
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == states[3]


def test_a_thread_that_cannot_set_signal_handlers_has_its_state_restored() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, lambda: os.environ.update(DRIVETRAIN_TEST_THREAD="1")).result()
    assert "DRIVETRAIN_TEST_THREAD" not in os.environ


def test_mixed_precision_flags_that_the_older_interface_cannot_read() -> None:
    # In a separate process, because torch refuses the older flags for good once the two disagree.
    code = """
from test_process_state import run, torch
cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, matmul.fp32_precision = "tf32", "ieee", "tf32"
def change():
    cudnn.conv.fp32_precision = matmul.fp32_precision = "ieee"
run(change)
print(cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, matmul.fp32_precision)
"""
    variables = {**os.environ, "PYTHONPATH": ":".join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert done.stdout.split() == ["tf32", "ieee", "tf32"]


def test_seed_everything_repeats_all_generators_and_refuses_what_is_no_seed() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    assert seed_everything(7) == 7
    first, second = draws(), draws()
    seed_everything(7, workers=False)
    assert draws() == first != second
    seeds: list[Any] = [-1, 2**32, 1.0, "3", True]
    for seed in seeds:
        with pytest.raises(ConfigurationError, match=r"(?s)seed=.*is not a seed.*Why: .*Fix: "):
            seed_everything(seed)


def test_derived_seeds_are_pinned_and_differ_by_value_order_and_number() -> None:
    assert derive_seed(0, 0) == 7075020478960855379
    assert derive_seed(1, 2, 3) == 6425717521400357366
    assert derive_seed() == 8099600782183737556
    parts = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (10,), (-1,), (2**70,), (1, 1), (11,), (1, 10), (11, 0)]
    seeds = [derive_seed(*each) for each in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
