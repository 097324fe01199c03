"""A-03: process-wide settings that a run changes are restored afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from drivetrain._runtime.process_state import ProcessState


def _set_environment() -> None:
    os.environ["PATH"] = "/nowhere"
    os.environ["DRIVETRAIN_TEST_NEW"] = "1"
    del os.environ["HOME"]


def _set_handler() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _set_hooks() -> None:
    sys.excepthook = lambda *_: None
    threading.excepthook = lambda *_: None


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _attribute(owner: Any, name: str, value: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    return (lambda: getattr(owner, name)), (lambda: setattr(owner, name, value))


_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn

# name -> (how to read it, how to change it)
_FIELDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "environment": (_environment, _set_environment),
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "cudnn.enabled": _attribute(_CUDNN, "enabled", False),
    "cudnn.benchmark": _attribute(_CUDNN, "benchmark", True),
    "cudnn.deterministic": _attribute(_CUDNN, "deterministic", True),
    "cudnn.allow_tf32": _attribute(_CUDNN, "allow_tf32", False),
    "fp32_precision": _attribute(torch.backends, "fp32_precision", "tf32"),
    "cudnn.conv": _attribute(_CUDNN.conv, "fp32_precision", "ieee"),
    "matmul": _attribute(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "mkldnn.matmul": _attribute(_MKLDNN.matmul, "fp32_precision", "bf16"),
    "matmul precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "deterministic": (torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("error")),
    "deterministic, warning": (torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("warn")),
    "filling memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "grad mode": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "signal handlers": (lambda: [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)], _set_handler),
    "hooks": (lambda: (sys.excepthook, threading.excepthook), _set_hooks),
    "python generator": (random.getstate, random.random),
    "numpy generator": (lambda: str(numpy.random.get_state()), numpy.random.rand),
    "torch generator": (lambda: torch.get_rng_state().tolist(), lambda: torch.rand(3)),
}


@pytest.mark.parametrize("field", _FIELDS)
def test_each_field_is_restored(field: str) -> None:
    read, change = _FIELDS[field]
    before = read()
    with ProcessState(generators=True):
        change()
        assert read() != before
    assert read() == before


def _change_everything_and_raise() -> None:
    with ProcessState(generators=True):
        for _, change in _FIELDS.values():
            change()
        raise RuntimeError("from inside")


def test_everything_is_restored_after_an_exception() -> None:
    before = {name: read() for name, (read, _) in _FIELDS.items()}
    with pytest.raises(RuntimeError, match="from inside"):
        _change_everything_and_raise()
    assert {name: read() for name, (read, _) in _FIELDS.items()} == before


def test_the_compilers_deterministic_flag_is_restored() -> None:
    with ProcessState():  # importing the compiler sets variables
        from torch._inductor import config
    with ProcessState():
        torch.use_deterministic_algorithms(True)
        assert config.deterministic
    assert not config.deterministic
    assert not torch.are_deterministic_algorithms_enabled()


def test_generators_are_only_restored_on_request() -> None:
    with ProcessState():
        torch.rand(())
        random.random()
        after = torch.get_rng_state(), random.getstate()
    assert torch.equal(torch.get_rng_state(), after[0])
    assert random.getstate() == after[1]


def test_works_in_a_thread_where_handlers_cannot_be_set() -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with ProcessState():
                os.environ["DRIVETRAIN_TEST_THREAD"] = "1"
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []
    assert "DRIVETRAIN_TEST_THREAD" not in os.environ


def test_mixed_precision_flags_that_the_older_interface_cannot_read() -> None:
    # In a separate process, because torch refuses the older flags for good once the two disagree.
    code = """
import torch
from drivetrain._runtime.process_state import ProcessState
cudnn = torch.backends.cudnn
cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = "tf32", "ieee"
torch.backends.cuda.matmul.fp32_precision = "tf32"
with ProcessState():
    cudnn.conv.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
print(cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
"""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.split() == ["tf32", "ieee", "tf32"]
