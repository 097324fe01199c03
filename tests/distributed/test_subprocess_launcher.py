"""Scripts that are run again for the other ranks, in the way users run them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from scripts import run_cases

from drivetrain.errors import DistributedError
from drivetrain.launchers import current_processes
from drivetrain.launchers.launched_processes import LAUNCHER_VARIABLE, PARENT_VARIABLE

_HEAD = """
import os, pathlib, signal, sys, threading, time
import torch
from drivetrain.environments import PlainEnvironment
from drivetrain.launchers import FunctionLauncher, SubprocessLauncher, current_processes

def place(number):
    return PlainEnvironment({}).first_placement_on_node(1, number)

def launch(number, **settings):
    world = SubprocessLauncher(**settings).launch(place(number))
    note_pid(world.placement.rank)
    return world

def note_pid(rank):
    pathlib.Path(f"pid-{rank}").write_text(str(os.getpid()))

def say(text):
    with open("reported", "a") as file:
        file.write(f"{text}\\n")
"""


def _environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    temporary = {"TMPDIR": str(folder)}  # where a killed caller leaves its folder
    return inherited | temporary | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _assert_gone(folder: Path, within: float = 0.0) -> None:
    until = time.monotonic() + within
    pids = [int(file.read_text()) for file in folder.glob("pid-*")]
    assert len(pids) > 1
    while any(_is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_is_running(pid) for pid in pids), folder


_ENDING = """
if CASE == "others fail":
    world = launch(3)
    if world.placement.rank == 1:
        raise ValueError("from rank one")
    if world.placement.rank == 2:
        world.store("pids").get("noticed")
        os.kill(os.getpid(), signal.SIGKILL)
    while not world.failures():
        time.sleep(0.01)
    try:
        launch(3)
    except Exception as error:
        say(f"{type(error).__name__}: {error.what}")
    world.store("pids").set("noticed", "1")
    while len(world.ended()) < 2:
        time.sleep(0.01)
    for failure in world.failures():
        say(f"{failure.rank} {failure.exit_code} {failure.signal_name} {failure.error_type} {failure.message}")
elif CASE == "another outlives the caller":
    current_processes()  # joined by the main thread, which is what the kernel's signal is bound to
    worlds = []

    def start():
        worlds.append(launch(2, grace=1.0))
        if worlds[0].is_caller:
            worlds[0].store("").get("joined")

    # The thread's end is not the caller's, though to the kernel the thread is the parent.
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    if not worlds[0].is_caller:
        worlds[0].store("").set("joined", "1")
        time.sleep(60)
    time.sleep(0.3)
    say(worlds[0].ended())
elif CASE == "through another program":
    class Nice(SubprocessLauncher):
        def command(self):
            return ["nice", "-n", "4", *super().command()]

    world = Nice().launch(place(2))
    note_pid(world.placement.rank)
    if world.is_caller:
        say(int(world.store("nice").get("1")) - os.nice(0))
    else:
        world.store("nice").set("1", str(os.nice(0)))
else:
    world = launch(2, grace_after_failure=0.2)
    if world.placement.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        world.store("").set("joined", "1")
        time.sleep(60)
    world.store("").get("joined")
    say(time.monotonic())
    raise ValueError("from the caller")
"""


def test_failures_reach_the_caller_and_no_rank_is_left(tmp_path: Path) -> None:  # G-01, G-02
    cases = ("others fail", "another outlives the caller", "the caller fails", "through another program")
    runs = run_cases(tmp_path, _ENDING, cases, head=_HEAD)
    ended = time.monotonic()
    assert [run.code for run in runs.values()] == [1, 1, 1, 0]  # also if the caller itself succeeded
    for number in range(4):
        _assert_gone(tmp_path / str(number))
    failed, outlived, caller, niced = runs.values()
    assert failed.reported == [
        "1 1 None ValueError from rank one",
        "2 -9 SIGKILL None killed by SIGKILL",
        "RankFailedError: Rank 1 failed with ValueError: from rank one",
    ]
    assert failed.errors.endswith("Rank 1 failed with ValueError: from rank one\n")
    assert failed.errors.count("Traceback") == 1  # rank 1's own code
    assert "torch.distributed.elastic" not in failed.errors
    assert outlived.reported == ["{}"]
    assert "Rank 1 did not end within 1 s after rank 0, and was terminated" in outlived.errors
    assert "ValueError: from the caller" in caller.errors
    assert "did not end" not in caller.errors
    assert ended - float(caller.reported[0]) < 15
    assert niced.reported == [str(min(4, 19 - os.nice(0)))]


_WAITING = {
    "script": "launch(2)",
    "script, from a thread that has ended": (
        "thread = threading.Thread(target=launch, args=(2,)); thread.start(); thread.join()"
    ),
    "function": 'FunctionLauncher("forkserver").call(place(2), work)',
}


def test_a_killed_caller_leaves_no_processes(tmp_path: Path) -> None:  # G-02
    callers = {}
    for number, launch in enumerate(_WAITING.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        body = f"""
        def work():
            note_pid(os.environ["RANK"])
            time.sleep(60)

        if __name__ == "__main__":
            {launch}
            time.sleep(60)
        """
        (folder / "script.py").write_text(_HEAD + textwrap.dedent(body))
        command, environment = [sys.executable, "script.py"], _environment(folder)
        callers[folder] = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    try:
        for folder, caller in callers.items():
            until = time.monotonic() + 60
            while len(list(folder.glob("pid-*"))) < 2:
                assert caller.poll() is None, folder
                assert time.monotonic() < until, folder
                time.sleep(0.02)
            caller.kill()
            caller.wait()
        for folder in callers:
            _assert_gone(folder, within=10.0)
    finally:
        for caller in callers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(caller.pid, signal.SIGKILL)


def test_a_process_belongs_to_the_world_only_of_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, "script")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getpid()))  # alive, and not our parent
    assert current_processes() is None
    dead = subprocess.Popen(["true"])
    dead.wait()
    monkeypatch.setenv(PARENT_VARIABLE, str(dead.pid))
    with pytest.raises(DistributedError, match="the process that started rank 3 has ended"):
        current_processes()
