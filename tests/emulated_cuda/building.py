"""Compiles the C++ extension of the emulation once per source, torch and compiler, and caches the library."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from drivetrain.errors import ConfigurationError

_NAME = "emulated_cuda"
_SOURCES = ("extension.cpp", "nccl.h", "kernels.h", "device.h", "order.h")
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_MAX_ERROR_LINES = 12  # the maximum number of lines of compiler output in an error


def emulation_obstacle() -> str | None:
    """Return in a few words why CUDA cannot be emulated in this process, or None if no reason is known."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if torch.version.cuda or torch.version.hip:
        return f"needs a build of torch without CUDA, this is {torch.__version__}"
    if _compiler() is None:
        return "needs a C++ compiler: g++, c++, clang++ or the compiler named by CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "needs Python's C headers, Python.h"
    return None


def load_extension() -> ModuleType:
    """Return the emulation's extension, compiling it first if necessary (about 20 seconds).

    The extension is cached below ``$TORCH_EXTENSIONS_DIR`` or the cache folder of the user. Only one process compiles
    the extension, and other processes wait.

    Raises:
        ConfigurationError: there is no compiler, or the extension does not compile for this torch.
    """
    reason = emulation_obstacle()
    if reason is not None:
        raise ConfigurationError(
            f"CUDA cannot be emulated here: the emulation {reason}.",
            "the emulation is a C++ extension for builds of torch without CUDA.",
            "install what is missing, or skip the test with emulated_cuda.requires_emulated_cuda().",
        )
    path = _build_cached()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
    except ImportError as error:
        raise _incompatible_error(str(error)) from error
    return extension


def _build_cached() -> Path:
    compiler = _compiler()
    assert compiler is not None
    command = _command(compiler)
    folder = _cache() / _digest(compiler, command)
    path = folder / f"{_NAME}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(command, path)
    except OSError as error:
        raise ConfigurationError(
            f"The emulation of CUDA cannot be cached in {folder}: {error}.",
            "the extension is compiled once and cached for later processes.",
            "set TORCH_EXTENSIONS_DIR to a writable folder.",
        ) from error
    return path


def _compile(command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library = Path(folder) / path.name
        result = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            raise _incompatible_error("\n".join(lines[:_MAX_ERROR_LINES]))
        os.replace(library, path)


def _incompatible_error(details: str) -> ConfigurationError:
    return ConfigurationError(
        f"The emulation of CUDA does not fit torch {torch.__version__} with {_compiler()}:\n{details}",
        "the extension is compiled against interfaces of torch that change between versions.",
        "use a version of torch from the documentation of emulated_cuda, or a newer drivetrain.",
    )


def _compiler() -> str | None:
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    return next((name for name in candidates if shutil.which(shlex.split(name)[0])), None)


def _command(compiler: str) -> list[str]:
    """Return the compiler command without the output option.

    The command does not optimise, because the kernels belong to torch.
    """
    root = Path(torch.__file__).parent
    return [
        *shlex.split(compiler),
        *("-std=c++20", "-O0", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        *(f"-I{root / path}" for path in ("include", "include/torch/csrc/api/include")),
        f"-I{sysconfig.get_path('include')}",
        str(Path(__file__).parent / _SOURCES[0]),
        f"-L{root / 'lib'}",
        *(f"-l{library}" for library in _LIBRARIES),
    ]


def _cache() -> Path:
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    if configured:
        return Path(configured) / _NAME
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drivetrain" / _NAME


def _digest(compiler: str, command: list[str]) -> str:
    """Return a digest of everything that affects the library, including the version of the compiler."""
    version = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(version)
    for part in (sys.version, torch.__version__, str(torch.version.git_version), *command):
        digest.update(part.encode() + b"\0")
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]
