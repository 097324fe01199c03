from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch

from drivetrain.errors import ConfigurationError
from drivetrain.launchers import FunctionLauncher, SubprocessLauncher, choose_launcher
from drivetrain.launchers.rerun import rerun_command


def _main(monkeypatch: pytest.MonkeyPatch, file: str | None, spec: str | None = None) -> None:
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    main.__spec__ = None if spec is None else importlib.machinery.ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", main)


def test_settings_name_launchers() -> None:
    assert isinstance(choose_launcher("subprocess", 2), SubprocessLauncher)
    for method in ("spawn", "forkserver", "fork"):
        launcher = choose_launcher(method, 2)
        assert isinstance(launcher, FunctionLauncher)
        assert launcher.start_method == method


def test_unknown_names_are_refused() -> None:  # G-06
    with pytest.raises(ConfigurationError, match=r"(?s)launcher='forkservr' is unknown. Did you mean 'forkserver'\?"):
        choose_launcher("forkservr", 2)


def test_auto_runs_scripts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _main(monkeypatch, __file__)
    assert isinstance(choose_launcher("auto", 2), SubprocessLauncher)


def test_auto_starts_a_function_where_somebody_types(monkeypatch: pytest.MonkeyPatch) -> None:
    _main(monkeypatch, None)
    launcher = choose_launcher("auto", 2)
    assert isinstance(launcher, FunctionLauncher)
    assert launcher.start_method == "fork"
    _main(monkeypatch, __file__)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert isinstance(choose_launcher("auto", 2), FunctionLauncher)
    monkeypatch.delattr(sys, "ps1")
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert isinstance(choose_launcher("auto", 2), FunctionLauncher)


def test_forking_after_cuda_was_used_is_refused_and_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    _main(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    launcher = choose_launcher("auto", 2)
    assert isinstance(launcher, FunctionLauncher)
    assert launcher.start_method == "forkserver"
    with pytest.raises(ConfigurationError, match=r'(?s)launcher="fork" cannot start 2 processes here.*used CUDA'):
        choose_launcher("fork", 2)


def test_the_command_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    _main(monkeypatch, __file__)
    monkeypatch.setattr(sys, "argv", ["relative/name.py", "--lr", "0.1"])
    command = rerun_command()
    assert command[0] == sys.executable
    assert command[-3:] == [__file__, "--lr", "0.1"]


@pytest.mark.parametrize(("spec", "module"), [("package.__main__", "package"), ("package.train", "package.train")])
def test_the_command_of_a_module(monkeypatch: pytest.MonkeyPatch, spec: str, module: str) -> None:
    _main(monkeypatch, __file__, spec)
    monkeypatch.setattr(sys, "argv", [__file__, "x"])
    assert rerun_command()[-3:] == ["-m", module, "x"]


def test_the_command_of_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    _main(monkeypatch, str(tmp_path / "__main__.py"), "__main__")
    monkeypatch.setattr(sys, "argv", [str(tmp_path)])
    assert rerun_command()[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("file", "argv", "reason"),
    [
        (None, ["-c"], "it comes from python -c"),
        (None, [""], "standard input, a REPL or a notebook"),
        ("<stdin>", ["-"], "standard input, a REPL or a notebook"),
    ],
)
def test_what_has_no_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, file: str | None, argv: list[str], reason: str
) -> None:  # G-06
    _main(monkeypatch, file)
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        rerun_command()
    assert "put the program into a file" in caught.value.fix
