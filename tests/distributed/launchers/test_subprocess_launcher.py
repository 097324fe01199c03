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

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers import current_world
from drivetrain.launchers.world import LAUNCHER_VARIABLE, PARENT_VARIABLE

_HEAD = """
import os, pathlib, signal, sys, threading, time
import torch
import torch.distributed as dist
from drivetrain.environments import PlainEnvironment
from drivetrain.launchers import SubprocessLauncher, current_world

folder = pathlib.Path(os.environ["TEST_FOLDER"])

def launch(number, **settings):
    world = SubprocessLauncher(**settings).launch(PlainEnvironment({}).first_placement_on_node(1, number))
    (folder / f"pid-{world.placement.rank}").write_text(str(os.getpid()))
    return world

def say(text):
    with open(folder / "said", "a") as file:
        file.write(f"{text}\\n")
"""


def _write(tmp_path: Path, body: str, name: str = "script.py") -> Path:
    script = tmp_path / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(_HEAD + textwrap.dedent(body))
    return script


def _environment(tmp_path: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return inherited | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "TEST_FOLDER": str(tmp_path),
        "TMPDIR": str(tmp_path),  # where a killed caller leaves its folder
    }


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=_environment(tmp_path),
        cwd=tmp_path,
        check=False,
    )


def _said(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "said").read_text().splitlines())


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _assert_gone(tmp_path: Path, within: float = 0.0) -> None:
    until = time.monotonic() + within
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert len(pids) > 1
    while any(_is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_is_running(pid) for pid in pids)


def test_every_rank_runs_the_whole_script(tmp_path: Path) -> None:
    _write(
        tmp_path,
        """
        before, handlers = dict(os.environ), [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
        world = launch(2)
        place = world.placement
        assert dict(os.environ) == before
        assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
        assert world.is_caller == (place.rank == 0)
        assert current_world() is world
        for run in range(2):
            dist.init_process_group("gloo", store=world.store(f"run{run}"), rank=place.rank, world_size=2)
            total = torch.tensor(place.rank + 1)
            dist.all_reduce(total)
            dist.destroy_process_group()
        # The processes that are there are used again, whichever rank asks; another number is refused.
        assert launch(2) is world
        try:
            launch(3)
        except Exception as error:
            say(f"{place.rank} refused {type(error).__name__}: {error.what}")
        names = [name for name in ("RANK", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS") if name in os.environ]
        sys.stdout.write(f"printed by {place.rank}\\n")  # in one piece: the ranks share the stream
        sys.stdout.flush()
        say(f"{place.rank} of {place.world_size} sum {total} {sys.argv[1:]} {sys.flags.dev_mode} {names}")
        """,
        "package/__main__.py",
    )
    run = _run(tmp_path, "-X", "dev", "-W", "ignore", "-m", "package", "--width", "a b")
    assert run.returncode == 0, run.stderr
    refusal = "refused ConfigurationError: 3 processes are requested, but this script runs in 2"
    torchrun = "['RANK', 'TORCHELASTIC_USE_AGENT_STORE', 'OMP_NUM_THREADS']"
    assert _said(tmp_path) == [
        "0 of 2 sum 3 ['--width', 'a b'] True []",
        f"0 {refusal}",
        f"1 of 2 sum 3 ['--width', 'a b'] True {torchrun}",
        f"1 {refusal}",
    ]
    assert sorted(run.stdout.splitlines()) == ["printed by 0", "printed by 1"]
    _assert_gone(tmp_path)


def test_failures_reach_the_caller_and_determine_its_exit_code(tmp_path: Path) -> None:  # G-01, G-02
    script = _write(
        tmp_path,
        """
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
        """,
    )
    run = _run(tmp_path, str(script))
    assert _said(tmp_path) == [
        "1 1 None ValueError from rank one",
        "2 -9 SIGKILL None killed by SIGKILL",
        "RankFailedError: Rank 1 failed with ValueError: from rank one",
    ]
    # The caller itself succeeded.
    assert run.returncode == 1
    assert run.stderr.endswith("Rank 1 failed with ValueError: from rank one\n")
    assert run.stderr.count("Traceback") == 1  # rank 1's own code
    assert "torch.distributed.elastic" not in run.stderr


def test_a_rank_that_outlives_the_caller_is_stopped_and_counts_as_failed(tmp_path: Path) -> None:  # G-01
    script = _write(
        tmp_path,
        """
        current_world()  # joined by the main thread, which is what the kernel's signal is bound to
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
        """,
    )
    run = _run(tmp_path, str(script))
    assert _said(tmp_path) == ["{}"]
    assert run.returncode == 1
    assert "Rank 1 did not end within 1 s after rank 0, and was terminated" in run.stderr
    _assert_gone(tmp_path)


def test_a_failing_caller_ends_the_others(tmp_path: Path) -> None:  # G-01
    script = _write(
        tmp_path,
        """
        world = launch(2, grace_after_failure=0.2)
        if world.placement.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            world.store("").set("joined", "1")
            time.sleep(60)
        world.store("").get("joined")
        (folder / "failed").write_text(str(time.monotonic()))
        raise ValueError("from the caller")
        """,
    )
    run = _run(tmp_path, str(script))
    assert run.returncode == 1
    assert "ValueError: from the caller" in run.stderr
    assert "did not end" not in run.stderr
    assert time.monotonic() - float((tmp_path / "failed").read_text()) < 15
    _assert_gone(tmp_path)


@pytest.mark.parametrize(
    "how",
    ["launch(2)", "thread = threading.Thread(target=launch, args=(2,)); thread.start(); thread.join()"],
    ids=["from the main thread", "from a thread that has ended"],
)
def test_a_killed_caller_leaves_no_processes(tmp_path: Path, how: str) -> None:  # G-02
    script = _write(
        tmp_path,
        f"""
        {how}
        if current_world().placement.rank == 1:
            say("ready")
        time.sleep(60)
        """,
    )
    process = subprocess.Popen([sys.executable, str(script)], env=_environment(tmp_path))
    try:
        until = time.monotonic() + 30
        while not (tmp_path / "said").exists() and time.monotonic() < until:
            time.sleep(0.02)
        process.kill()
        process.wait()
        _assert_gone(tmp_path, within=5.0)
    finally:
        for file in tmp_path.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_program_without_a_file_is_refused(tmp_path: Path) -> None:  # G-06
    code = """
    from drivetrain.launchers import choose_launcher

    class Local:
        value = 7

    try:
        choose_launcher("subprocess", 2).launch(PlainEnvironment({}).first_placement_on_node(1, 2))
    except Exception as error:
        say(type(error).__name__ + " " + error.why + " " + error.fix)
    launcher = choose_launcher("auto", 2)
    # Forked, so that what was typed in exists there.
    placement = PlainEnvironment({}).first_placement_on_node(1, 2)
    say(launcher.start_method + str(launcher.launch(placement, lambda: Local.value)))
    """
    run = _run(tmp_path, "-c", _HEAD + textwrap.dedent(code))
    assert run.returncode == 0, run.stderr
    refused, forked = _said(tmp_path)
    assert refused.startswith(
        "ConfigurationError the program has no file: it comes from python -c put the program into a file"
    )
    assert forked == "fork7"


def test_a_process_started_by_a_rank_is_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, "subprocess")
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getpid()))  # alive, and not our parent
    assert current_world() is None


def test_a_rank_without_its_caller_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    monkeypatch.setenv(LAUNCHER_VARIABLE, "subprocess")
    monkeypatch.setenv(PARENT_VARIABLE, str(dead.pid))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(DistributedError, match="the process that started rank 3 has ended"):
        current_world()


def test_only_the_first_rank_of_a_node_launches() -> None:
    from drivetrain.launchers import SubprocessLauncher

    with pytest.raises(ConfigurationError, match="local rank 1 cannot start the other processes"):
        SubprocessLauncher().launch(Placement(1, 2, 1, 2))
