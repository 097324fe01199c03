"""O-01: the extension is compiled once, and errors say what prevents it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError
from emulated_cuda import building, emulated_cuda, requires_emulated_cuda
from worlds import on_emulated_cuda

pytestmark = requires_emulated_cuda()

# A fake compiler that copies an existing library to its output. It takes some time, and counts its calls.
COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "copying 1.0"; exit 0;; esac
echo called >> "{calls}"
while [ "$1" != "-o" ]; do shift; done
head -c 100 "{made}" > "$2"
sleep 0.5
cp "{made}" "$2"
"""


def _path(gpu: object) -> str:
    return sys.modules["emulated_cuda.emulation"]._loaded[0].__file__


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = on_emulated_cuda(_path).returned
    script = tmp_path / "cxx"
    script.write_text(COMPILER.format(calls=tmp_path / "calls", made=made))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "calls"


def _build(sizes: list[int], index: int) -> None:
    sizes[index] = building._build_cached().stat().st_size


def test_processes_that_ask_at_once_wait_for_the_one_that_compiles(compiler: Path) -> None:
    # O-01
    context = multiprocessing.get_context("fork")
    sizes: Any = context.Array("q", 3)
    processes = [context.Process(target=_build, args=(sizes, index)) for index in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert compiler.read_text().splitlines() == ["called"]
    size = building._build_cached().stat().st_size
    assert list(sizes) == [size] * 3
    assert size > 10_000
    assert compiler.read_text().splitlines() == ["called"]


def test_another_compiler_or_another_source_is_another_build(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # O-01
    first = building._build_cached()
    other = compiler.with_name("cxx2")
    shutil.copy(os.environ["CXX"], other)
    monkeypatch.setenv("CXX", str(other))
    second = building._build_cached()
    monkeypatch.setattr(building, "_SOURCES", building._SOURCES[:-1])
    third = building._build_cached()
    assert len({first, second, third}) == 3
    assert len(compiler.read_text().splitlines()) == 3


def test_a_build_that_was_cut_off_is_made_again(compiler: Path) -> None:
    # O-01
    path = building._build_cached()
    (path.parent / "tmpcut").mkdir()
    (path.parent / "tmpcut" / path.name).write_bytes(b"half")
    path.unlink()
    assert building._build_cached().stat().st_size > 10_000


def test_what_a_compiler_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # O-01
    script = tmp_path / "cxx"
    script.write_text("#!/bin/sh\necho 'x.h:1: fatal error: no such member' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    with pytest.raises(ConfigurationError, match=r"(?s)does not fit torch.*no such member"):
        building.load_extension()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_file_that_is_no_extension_is_told_of(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # O-01
    building._build_cached().write_bytes(b"no library")
    with pytest.raises(ConfigurationError, match="does not fit torch"):
        building.load_extension()


def test_a_folder_that_cannot_be_written_to_is_named(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # O-01
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(compiler.with_name("cxx")))  # a file
    with pytest.raises(ConfigurationError, match="set TORCH_EXTENSIONS_DIR"):
        building._build_cached()


def test_without_a_compiler_tests_are_skipped_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    # O-01
    monkeypatch.setenv("CXX", "/no/such/compiler")
    mark = requires_emulated_cuda()
    assert mark.args == (True,)
    assert "needs a C++ compiler" in mark.kwargs["reason"]
    with pytest.raises(ConfigurationError, match=r"C\+\+ compiler"):
        building.load_extension()
    monkeypatch.setattr("torch.version.cuda", "12.6")
    assert "without CUDA" in requires_emulated_cuda().kwargs["reason"]


def test_a_torch_of_other_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # O-01
    monkeypatch.delattr("torch.cuda._queued_calls")
    pattern = r"does not fit torch .*has no _queued_calls"
    with pytest.raises(ConfigurationError, match=pattern), emulated_cuda():
        pass


def test_what_is_compiled_goes_with_the_package() -> None:
    # O-01
    folder = Path(building.__file__).parent
    assert {path.name for path in folder.glob("*.[ch]*")} == set(building._SOURCES)
