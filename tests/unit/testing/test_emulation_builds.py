"""O-01: the extension is compiled once, and errors say what prevents it."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain import ConfigurationError
from emulated_cuda import building, requires_emulated_cuda
from worlds import on_emulated_cuda

pytestmark = requires_emulated_cuda()

# A fake compiler that copies an existing library to its output. It takes some time, and counts its calls.
COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "copying 1.0"; exit 0;; esac
echo called >> "{calls}"
while [ "$1" != "-o" ]; do shift; done
head -c 100 "{library}" > "$2"
sleep 0.1
cp "{library}" "$2"
"""


def _library(gpu: object) -> str:
    return sys.modules["emulated_cuda.emulation"]._loaded[0].__file__


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "cxx"
    script.write_text(COMPILER.format(calls=tmp_path / "calls", library=on_emulated_cuda(_library).returned))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "calls"


def _build(index: int) -> None:
    building._build_cached()


def test_concurrent_processes_compile_once(compiler: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_build, args=(index,)) for index in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert building._build_cached().stat().st_size > 10_000
    assert compiler.read_text().splitlines() == ["called"]


def failing_compiler(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.with_name("cxx").write_text("#!/bin/sh\necho 'x.h:1: fatal error: no such member' >&2\nexit 1\n")


def broken_library(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    building._build_cached().write_bytes(b"no library")


def folder_that_is_a_file(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(compiler.with_name("cxx")))


def no_compiler(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert requires_emulated_cuda().args == (True,)
    assert "needs a C++ compiler" in requires_emulated_cuda().kwargs["reason"]


@pytest.mark.parametrize(
    ("prevent", "message"),
    [
        (failing_compiler, r"(?s)does not fit torch.*no such member"),
        (broken_library, "does not fit torch"),
        (folder_that_is_a_file, "set TORCH_EXTENSIONS_DIR"),
        (no_compiler, r"C\+\+ compiler"),
    ],
)
def test_an_error_says_what_prevents_the_build(
    prevent: Callable[..., None], message: str, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prevent(compiler, monkeypatch)
    with pytest.raises(ConfigurationError, match=message):
        building.load_extension()
