"""ProcessState: saves process-wide settings that a run changes, and restores them afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
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
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        self._restore = [
            _save_environment(),
            _save_default_dtype(),
            _save_backend_flags(),
            _save_deterministic(),
            _save_autograd(),
            _save_exception_hooks(),
            _save_device(),
        ]
        if threading.current_thread() is threading.main_thread():
            self._restore.append(_save_signal_handlers())
        if self._generators:
            self._restore.append(generators_restorer(torch.device("cpu")))
            self._restore.append(_save_cuda_generators(self._cuda_generators))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for restore in self._restore:
            restore()


def _save_environment() -> Callable[[], None]:
    before = dict(os.environ)

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    return restore


def _save_device() -> Callable[[], None]:
    # Querying the current device would initialise CUDA. Until CUDA is initialised, device 0 is the current device.
    before = torch.cuda.current_device() if _cuda_is_in_use() else 0

    def restore() -> None:
        if _cuda_is_in_use() and torch.cuda.current_device() != before:
            torch.cuda.set_device(before)

    return restore


def _save_default_dtype() -> Callable[[], None]:
    before = torch.get_default_dtype()
    return lambda: torch.set_default_dtype(before)


def _save_backend_flags() -> Callable[[], None]:
    before = [(owner, name, _read(owner, name)) for owner, name in _BACKEND_FLAGS]
    matmul = _matmul_precision()

    def restore() -> None:
        if matmul is not None and _matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        for owner, name, value in before:
            if value is not None and _read(owner, name) != value:
                setattr(owner, name, value)

    return restore


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None  # the newer flags that this setting combines differ, as `_read` explains


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except RuntimeError:
        # An older flag combines several newer flags, and raises an error if the newer flags have different values.
        return None


def _save_deterministic() -> Callable[[], None]:
    # CUBLAS_WORKSPACE_CONFIG is restored with the environment.
    mode = torch.get_deterministic_debug_mode()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    compiler = _inductor_deterministic()

    def restore() -> None:
        # This function is used because `use_deterministic_algorithms` would import the compiler.
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fill
        if _inductor_deterministic() not in (None, bool(compiler)):
            sys.modules[_INDUCTOR_CONFIG].deterministic = bool(compiler)  # type: ignore[attr-defined]

    return restore


def _inductor_deterministic() -> bool | None:
    """Return the flag that `use_deterministic_algorithms` sets in the compiler, or None if no compiler is imported."""
    return getattr(sys.modules.get(_INDUCTOR_CONFIG), "deterministic", None)


def _save_autograd() -> Callable[[], None]:
    grad = torch.is_grad_enabled()
    anomaly, check_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def restore() -> None:
        torch.set_grad_enabled(grad)
        torch.autograd.set_detect_anomaly(anomaly, check_nan)

    return restore


def _save_exception_hooks() -> Callable[[], None]:
    main, threads = sys.excepthook, threading.excepthook

    def restore() -> None:
        sys.excepthook, threading.excepthook = main, threads

    return restore


def _save_signal_handlers() -> Callable[[], None]:
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


def _save_cuda_generators(cuda: bool) -> Callable[[], None]:
    devices = torch.cuda.get_rng_state_all() if cuda or _cuda_is_in_use() else []

    def restore() -> None:
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore
