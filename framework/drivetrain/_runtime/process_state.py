"""ProcessState: saves process-wide settings that a run changes, and restores them afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from drivetrain._runtime.generators import generators_restorer

_INDUCTOR_CONFIG = "torch._inductor.config"

# Flags that are restored, in this order. A parent comes before the flags that inherit its value, because restoring the
# parent afterwards would overwrite their values.
_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
_BACKEND_FLAGS: tuple[tuple[Any, str], ...] = (
    (_cudnn, "enabled"),
    (_cudnn, "benchmark"),
    (_cudnn, "benchmark_limit"),
    (_cudnn, "deterministic"),
    (_cudnn, "allow_tf32"),
    (torch.backends, "fp32_precision"),
    (_cudnn, "fp32_precision"),
    (_cudnn.conv, "fp32_precision"),
    (_cudnn.rnn, "fp32_precision"),
    (torch.backends.cuda.matmul, "fp32_precision"),
    (_mkldnn, "fp32_precision"),
    (_mkldnn.matmul, "fp32_precision"),
)


class ProcessState:
    """Save the state of the process on entry and restore it on exit, also after an exception.

    The saved state comprises:

    - environment variables, the default dtype, flags of cuDNN and matmul, and deterministic algorithms with
      ``CUBLAS_WORKSPACE_CONFIG``,
    - grad mode and anomaly detection, but not inference mode,
    - signal handlers, in the main thread only, because no other thread may set them,
    - the current CUDA device,
    - ``sys.excepthook`` and ``threading.excepthook``, which every call of ``init_process_group`` wraps again,
    - optionally the random generators.

    Args:
        generators: include the random generators of Python, of NumPy if it is imported, and of torch on the CPU.
        cuda_generators: with ``generators``, include the generators of all CUDA devices. Reading their state
            initialises CUDA. Without this flag they are included only if CUDA is already in use.
    """

    __slots__ = ("_cuda_generators", "_generators", "_restore")

    def __init__(self, *, generators: bool = False, cuda_generators: bool = False) -> None:
        self._generators = generators
        self._cuda_generators = cuda_generators
        self._restore: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        self._restore = [
            _saved_environment(),
            _saved(torch.get_default_dtype, torch.set_default_dtype),
            _saved(_matmul_precision, torch.set_float32_matmul_precision),
            *(_saved_attribute(owner, name) for owner, name in _BACKEND_FLAGS),
            # This function is used because `use_deterministic_algorithms` would import the compiler.
            _saved(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
            _saved_attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
            partial(_set_compiler_deterministic, bool(_compiler_deterministic())),
            _saved(torch.is_grad_enabled, torch.set_grad_enabled),
            partial(
                torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            ),
            _saved_attribute(sys, "excepthook"),
            _saved_attribute(threading, "excepthook"),
            _saved(_current_device, _set_device),
        ]
        if threading.current_thread() is threading.main_thread():
            self._restore.append(_saved_signal_handlers())
        if self._generators:
            self._restore.append(generators_restorer(torch.device("cpu")))
            self._restore.append(_saved_cuda_generators(self._cuda_generators))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for restore in self._restore:
            restore()


def apply_switches(deterministic: bool | str | None, benchmark: bool | None, detect_anomaly: bool) -> None:
    """Enable gradients, and set torch's flags from the arguments of `Fit`. None leaves a flag unchanged."""
    torch.set_grad_enabled(True)  # fit may be called under no_grad
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic:
            # cuBLAS is only deterministic with this variable. If it is set too late, torch's error names it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            _cudnn.benchmark = False
    if benchmark is not None:
        _cudnn.benchmark = benchmark
    if detect_anomaly:
        torch.autograd.set_detect_anomaly(True)


def _saved(read: Callable[[], Any], write: Callable[[Any], object]) -> Callable[[], None]:
    """Return a function that writes the current value again if the value has changed. None is not written."""
    before = read()

    def restore() -> None:
        if before is not None and read() != before:
            write(before)

    return restore


def _saved_attribute(owner: Any, name: str) -> Callable[[], None]:
    return _saved(partial(_read, owner, name), partial(setattr, owner, name))


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except RuntimeError:
        # An older flag combines several newer flags, and raises an error if the newer flags have different values.
        return None


def _saved_environment() -> Callable[[], None]:
    before = dict(os.environ)

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    return restore


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None  # the newer flags that this setting combines differ, as `_read` explains


def _compiler_deterministic() -> bool | None:
    """Return the flag that `use_deterministic_algorithms` sets in the compiler, or None if no compiler is imported."""
    return getattr(sys.modules.get(_INDUCTOR_CONFIG), "deterministic", None)


def _set_compiler_deterministic(value: bool) -> None:
    if _compiler_deterministic() not in (None, value):
        sys.modules[_INDUCTOR_CONFIG].deterministic = value  # type: ignore[attr-defined]


def _current_device() -> int:
    # Querying the current device would initialise CUDA. Until CUDA is initialised, device 0 is the current device.
    return torch.cuda.current_device() if _cuda_is_in_use() else 0


def _set_device(index: int) -> None:
    if _cuda_is_in_use():
        torch.cuda.set_device(index)


def _saved_signal_handlers() -> Callable[[], None]:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore() -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in before.items():
            # A handler that C code set is None here. Python can neither read nor restore such a handler.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    return restore


def _cuda_is_in_use() -> bool:
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use


def _saved_cuda_generators(cuda: bool) -> Callable[[], None]:
    devices = torch.cuda.get_rng_state_all() if cuda or _cuda_is_in_use() else []

    def restore() -> None:
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore
