from __future__ import annotations

import ctypes
import doctest
import importlib.machinery
import sys
import types
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import ConfigurationError
from drivetrain.launchers import FunctionLauncher, choose_launcher

# Private: what the launchers decide by the program that runs, without starting such programs.
from drivetrain.launchers._rerun_command import rerun_command
from drivetrain.launchers._script_runners import runner


def _main(monkeypatch: pytest.MonkeyPatch, file: str | None, spec: str | None = None) -> None:
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    main.__spec__ = None if spec is None else importlib.machinery.ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", main)


def _away(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without pytest's own calls on the stack, as in a script."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def started_by(setting: str) -> str:
    """Return how the chosen launcher starts processes."""
    launcher = choose_launcher(setting, 2)
    return launcher.start_method if isinstance(launcher, FunctionLauncher) else type(launcher).__name__


def test_a_setting_names_a_launcher_that_works_here(monkeypatch: pytest.MonkeyPatch) -> None:  # A-06, G-06
    for method in ("spawn", "forkserver", "fork"):
        assert started_by(method) == method
    assert started_by("subprocess") == "SubprocessLauncher"
    with pytest.raises(ConfigurationError, match=r"(?s)launcher='forkservr' is unknown. Did you mean 'forkserver'\?"):
        choose_launcher("forkservr", 2)
    _main(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert started_by("auto") == "forkserver"
    with pytest.raises(ConfigurationError, match=r'(?s)launcher="fork" cannot start 2 processes here.*used CUDA'):
        choose_launcher("fork", 2)


def test_auto_runs_scripts_again_unless_other_code_would_run_too(monkeypatch: Any, tmp_path: Path) -> None:  # I-19
    for name in ("train.py", "celery.py"):
        _main(monkeypatch, str(tmp_path / name))
        assert _away(started_by, "auto") == "SubprocessLauncher"
    refused = "runs this code among other code, which a second start would run"
    for file, spec in (("bin/pytest", None), ("unittest/__main__.py", "unittest.__main__"), ("bin/gunicorn", None)):
        _main(monkeypatch, str(tmp_path / file), spec)
        assert _away(started_by, "auto") == "fork"
        with pytest.raises(ConfigurationError, match=refused):
            _away(rerun_command)
    _main(monkeypatch, __file__)
    assert started_by("auto") == "fork"  # here, pytest's own calls are on the stack
    with pytest.raises(ConfigurationError, match=refused):
        rerun_command()


def test_other_test_runners_are_recognised_by_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:  # I-19
    found: list[str | None] = []

    class Test(unittest.TestCase):
        def test(self) -> None:
            found.append(runner())

    def by_doctest() -> None:
        example = doctest.DocTestParser().get_doctest(">>> found.append(runner())", globs, "example", None, 0)
        doctest.DocTestRunner(verbose=False).run(example)

    globs = {"found": found, "runner": runner}
    _main(monkeypatch, __file__)
    _away(Test("test").debug)
    _away(by_doctest)
    assert found == ["unittest", "doctest"]
    assert _away(runner) is None
    assert runner() == "pytest"


def test_autograd_s_threads_forbid_forking(monkeypatch: pytest.MonkeyPatch) -> None:  # I-19
    # A backward pass starts these threads if there is an accelerator, and a forked copy's backward pass would raise.
    _main(monkeypatch, None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ctypes.CDLL(None).prctl, 15, b"pt_autograd_0", 0, 0, 0).result()  # names the thread
        assert started_by("auto") == "forkserver"
        with pytest.raises(ConfigurationError, match="autograd's device threads"):
            choose_launcher("fork", 2)


def test_auto_starts_a_function_in_an_interactive_session(monkeypatch: pytest.MonkeyPatch) -> None:
    _main(monkeypatch, None)
    assert started_by("auto") == "fork"
    _main(monkeypatch, __file__)
    with monkeypatch.context() as interactive:
        interactive.setattr(sys, "ps1", ">>> ", raising=False)
        assert _away(started_by, "auto") == "fork"
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert _away(started_by, "auto") == "fork"


def test_the_command_of_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = {None: [__file__], "package.__main__": ["-m", "package"], "asv.train": ["-m", "asv.train"]}
    monkeypatch.setattr(sys, "argv", ["relative/name.py", "--lr", "0.1"])
    for spec, program in programs.items():
        _main(monkeypatch, __file__, spec)
        command = _away(rerun_command)
        assert command[0] == sys.executable
        assert command[-2 - len(program) :] == [*program, "--lr", "0.1"]
    _main(monkeypatch, str(tmp_path / "__main__.py"), "__main__")
    monkeypatch.setattr(sys, "argv", [str(tmp_path)])
    assert _away(rerun_command)[-1] == str(tmp_path)  # a folder


def test_a_program_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # G-06
    typed = "standard input, a REPL or a notebook"
    for file, argv, reason in ((None, "-c", "it comes from python -c"), (None, "", typed), ("<stdin>", "-", typed)):
        _main(monkeypatch, None)
        if file is not None:
            sys.modules["__main__"].__file__ = file
        monkeypatch.setattr(sys, "argv", [argv])
        with pytest.raises(ConfigurationError, match=reason) as caught:
            rerun_command()
        assert "put the program into a file" in caught.value.fix
