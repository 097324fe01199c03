"""The tools of `make bench`, what they count of a rank's work, and `make cuda` on a machine without a GPU (O-05)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import drivetrain
import drivetrain_strategies
from benchmarks import results
from benchmarks.calls import python_calls, python_calls_a_step
from benchmarks.cuda import outcome, packages, report
from benchmarks.cuda.__main__ import _stands
from benchmarks.cuda.parts import ALL, MOST, ROOT, Piece, chosen, parts
from benchmarks.cuda.processes import run
from benchmarks.fake_world import fake_world
from benchmarks.pages import put
from benchmarks.parts import RULES, part_of
from benchmarks.peers import ours
from benchmarks.scale import by_engine
from benchmarks.slopes import time_loops
from benchmarks.turns import Turns
from benchmarks.work import WAYS, WORKS, Way, raw
from drivetrain.testing import requires_linux
from emulated_cuda import building, requires_emulated_cuda, torch_cuda


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_engine_does_the_same_work_as_the_raw_loop(way: Way, capsys: pytest.CaptureFixture[str]) -> None:
    assert ours.train(WORKS["linear"], way, 7) == raw(WORKS["linear"], 7)
    assert capsys.readouterr().out == ""


def test_the_work_of_a_rank_is_the_same_among_thousands_as_among_eight() -> None:  # H-01
    calls = []
    for size in (8, 4096):
        run_steps = partial(by_engine, size)
        with fake_world(size):
            run_steps(2)
            calls.append((python_calls(run_steps, 1), python_calls_a_step(run_steps)))
    few, many = calls
    assert many[0] <= few[0] + 50  # no work is done per rank
    assert abs(many[1] - few[1]) <= 1


def test_loops_take_turns_at_the_same_steps_and_different_work_is_refused() -> None:
    steps, batch, seen = 2, 3, []
    turns = Turns(steps, batch)

    def loop(name: str, result: float = 1.0) -> float:
        seen.append(name)
        for _ in DataLoader(turns.data(torch.arange(4.0 * steps * batch)), batch_size=batch):
            seen.append(name)
        seen.append(name)
        return result

    found = turns.run({name: partial(loop, name) for name in "abc"})
    assert "".join(seen) == "abc" + 3 * "aabbcc" + "aaabbbccc"
    assert [(name, len(slopes.wall), len(slopes.busy)) for name, slopes in found.items()] == [(n, 2, 2) for n in "abc"]
    with pytest.raises(SystemExit, match="different work: after 8 steps"):
        turns.run({name: partial(loop, name, result) for name, result in (("a", 1.0), ("b", 1.0 + 1e-12))})
    with pytest.raises(SystemExit, match="different work"):
        time_loops({"one": lambda steps: 1.0, "other": lambda steps: 1.0 + 1e-12}, 1, {"one": 2, "other": 3}, 1)


def test_every_path_of_ours_in_the_table_of_parts_exists() -> None:
    assert part_of(None) is None  # the time before and after the steps
    roots = {"drivetrain": drivetrain, "drivetrain_strategies": drivetrain_strategies}
    ours = [fragment for fragment, _ in RULES if fragment.startswith("/drivetrain")]
    paths = [Path(str(roots[fragment.split("/")[1]].__file__)).parents[1] / fragment[1:] for fragment in ours]
    assert [path for path in paths if not path.exists()] == []


def test_the_summary_page_matches_the_long_tables() -> None:
    page, pictures = results.page(results.DOCS)
    assert (results.DOCS / "benchmarks.md").read_text() == page, "run `python -m benchmarks.results`"
    for name, picture in pictures.items():
        assert (results.DOCS / "images" / name).read_text() == picture, name


# One of each part, so that the suite rehearses the whole in little time; `make cuda REHEARSE=1` runs all.
PIECES = [
    *("tests/loss_scaling", "parity/single_device", "syncs/ddp", "steps/gpt-124m", "memory/ddp"),
    *("sanitizer/single_device", "variants/cuda-graphs"),
]


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "benchmarks.cuda", *arguments]
    # If a script runs the tests in the background, SIGINT is ignored here, and would be in the process too.
    interruptible: Any = {"preexec_fn": partial(signal.signal, signal.SIGINT, signal.SIG_DFL)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes, **interruptible)


@requires_emulated_cuda()
@pytest.mark.timeout(600)
def test_a_stopped_rehearsal_resumes_and_its_report_has_every_part(tmp_path: Path) -> None:  # O-05
    asked = ["--rehearse", "--folder", str(tmp_path), *PIECES]
    first = tmp_path / "parts" / "tests-loss_scaling.json"
    stopped = started(*asked)
    until = time.monotonic() + 150
    while not first.exists() and stopped.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    stopped.send_signal(signal.SIGINT)
    printed, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 130, printed
    assert "Stopped: the same command goes on from here." in printed
    before = json.loads((tmp_path / "report.json").read_text())
    done = {part["name"]: [piece["status"] for piece in part["pieces"]] for part in before["parts"]}
    assert done["tests"] == ["ok"]
    assert done["variants"] == []
    again = started(*asked)
    printed, _ = again.communicate(timeout=400)
    assert again.returncode == 0, printed
    assert "tests/loss_scaling: ok, as it was run before" in printed
    whole = json.loads((tmp_path / "report.json").read_text())
    about = whole["about"]
    assert about["torch"] == torch.__version__
    assert [device["name"] for device in about["devices"]] == ["Emulated H100"] * 2
    assert {"python", "processor", "commit", "command", "cuda"} <= about.keys()
    pieces = {part["name"]: part["pieces"] for part in whole["parts"]}
    for name in PIECES:
        part = name.partition("/")[0]
        (piece,) = pieces[part]
        assert f"{piece['part']}/{piece['name']}" == name
        assert piece["status"] == ("not shown here" if part in ("sanitizer", "variants") else "ok"), piece["reason"]
        assert piece["rows"], part
        assert all(len(row) == len(piece["columns"]) for row in piece["rows"]), part
        assert {"seconds", "date", "commit", "torch", "log"} <= piece.keys()
    steps, sanitizer = pieces["steps"][0], pieces["sanitizer"][0]
    assert steps["figures"]["gpt-124m, bf16-mixed: engine"]["mfu"] > 0
    assert steps["notes"] == ["the loops' weights are equal to the last bit"]
    assert sanitizer["figures"].pop("a race that was planted") != ""
    assert set(sanitizer["figures"].values()) == {""}
    page = (tmp_path / "report.md").read_text()
    assert "A rehearsal on emulated devices" in page
    assert all(f"### {each.title}\n" in page for each in parts(2))
    assert "not shown here: torch's sanitizer" in page
    assert "CUDA graphs: torch.compile ran with backend='eager'" in page


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_without_a_gpu_it_states_the_search_and_a_fix() -> None:  # O-05
    refused = started("steps")
    printed, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert f"torch {torch.__version__} is built without CUDA" in printed
    assert "make cuda PYTHON=" in printed
    assert "make cuda REHEARSE=1" in printed


def test_the_parts_fit_into_the_available_time_and_can_be_selected() -> None:  # O-05
    for devices in (1, 8):
        assert sum(part.seconds for part in parts(devices)) <= ALL
        assert all(part.seconds <= MOST for part in parts(devices))
        assert all(piece.seconds <= part.seconds for part in parts(devices) for piece in part.pieces)
    names = [part.name for part in parts(1)]
    assert names == ["tests", "parity", "syncs", "steps", "memory", "sanitizer", "variants"], "in order of worth"
    files = {piece.name for piece in parts(1)[0].pieces}
    assert {"on_a_device", "strategies_on_a_device", "fsdp_cuda", "nccl_failures", "loss_scaling"} <= files
    one, four = ({piece.name for part in parts(count) for piece in part.pieces} for count in (1, 4))
    assert {"fsdp-on-all", "deepspeed_stage_3-on-all"} <= four - one
    steps, memory = chosen(["steps", "memory/fsdp"], 1)
    assert (steps.name, memory.name) == ("steps", "memory")
    assert [piece.key for piece in memory.pieces] == ["memory/fsdp"]
    with pytest.raises(ValueError, match="no part 'stepss'; there are tests, parity"):
        chosen(["stepss"], 1)
    with pytest.raises(ValueError, match=r"no part 'steps/gtp'; there are steps/linear"):
        chosen(["steps/gtp"], 1)


@requires_linux()
def test_a_hanging_command_is_ended_with_its_subprocesses_and_a_dying_one_described(tmp_path: Path) -> None:  # O-05
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '300'], process_group=0).pid, flush=True)"
    ended = run([sys.executable, "-c", f"{child}; time.sleep(300)"], 1.5, tmp_path / "log", {}, "it")
    assert ended.code is None
    assert "its time was over" in ended.how
    state = Path(f"/proc/{int(ended.tail)}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    ended = run([sys.executable, "-c", "import os; print('so far'); os.abort()"], 30, tmp_path / "log", {}, "it")
    assert ended.how == "it was ended by SIGABRT"
    assert ended.tail.startswith("so far")


WITH_CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="the emulation runs in this build of torch")
HEADERS = Path(sysconfig.get_path("include")) / "Python.h"


@WITH_CUDA
@pytest.mark.timeout(400)
@pytest.mark.skipif(building._compiler() is None or not HEADERS.is_file(), reason="needs a C++ compiler and Python.h")
def test_the_source_of_the_emulated_cuda_compiles() -> None:  # O-06
    compiler = building._compiler()
    assert compiler is not None
    done = subprocess.run([*building._command(compiler), "-fsyntax-only"], capture_output=True, text=True)
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if "error" in line]


@WITH_CUDA
def test_torch_has_the_names_that_the_emulated_cuda_replaces() -> None:  # O-06
    torch_cuda.check_torch_version()
    names = set(re.findall(r'"(_cuda_\w+)":', Path(torch_cuda.__file__).read_text()))
    assert len(names) > 20
    assert not {name for name in names if not hasattr(torch._C, name)}


VERSIONS = {"python": "3.12.3", "torch": "2.11.0", "cuda": "13.0", "driver": "580", "nccl": "2.28.9", "commit": "abc"}
MACHINE = {"devices": [{"name": "A100"}] * 2, "processor": "any", "cores": 16, "command": "python -m benchmarks.cuda"}
ABOUT: dict[str, Any] = VERSIONS | MACHINE


def test_failures_are_in_the_report_with_their_reason(tmp_path: Path) -> None:  # O-05
    ends = {"linear": "ok", "mlp": "failed", "gpt": "crashed", "gpt-124m": "a package is missing"}
    for name, status in ends.items():
        record = {"status": status, "reason": f"because of {name}", "seconds": 1.0, "log": "a.log", "commit": "abc"}
        rows = {"columns": ["Network"], "rows": [[name]], "date": "today", "name": name, "part": "steps"}
        outcome.write_json(report.path_of(tmp_path, Piece("steps", name, 1)), {**record, **rows})
    report.path_of(tmp_path, Piece("steps", "gpt-124m-ddp", 1)).write_text('{"status": "o')  # interrupted
    page = report.write(tmp_path, ABOUT, 2)
    versions = "Python 3.12.3, torch 2.11.0, CUDA 13.0, driver 580, NCCL 2.28.9"
    assert f"2 x A100; any, 16 cores; {versions}; commit abc" in page
    assert "| A step over the loop written by hand (`steps`) | 1 | 3 | 0 | 2 | 4 |" in page
    for name, status in ends.items():
        assert (f"**{status}**: because of {name} (logs/a.log)" in page) == (status != "ok")
    merged = json.loads((tmp_path / "report.json").read_text())
    (steps,) = (part for part in merged["parts"] if part["name"] == "steps")
    assert steps["not_run"] == ["gpt-124m-ddp", "gpt-124m-fsdp"]
    before = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    (tmp_path / "gpu.md").write_text(before)
    put(report.NAME, page.rstrip(), tmp_path / "gpu.md")
    after = (tmp_path / "gpu.md").read_text()
    assert "2 x A100; any, 16 cores" in after
    assert "It was not run on a GPU yet" not in after
    assert after.partition("<!-- cuda -->")[0] == before.partition("<!-- cuda -->")[0]
    assert after.partition("<!-- end of cuda -->")[2] == before.partition("<!-- end of cuda -->")[2]


def test_an_outcome_has_the_status_of_its_findings_and_stands_for_the_torch_that_ran_it(tmp_path: Path) -> None:  # O-05
    rows: dict[str, Any] = {"columns": ["a"], "rows": [["1"]]}
    assert outcome.Outcome(**rows).status == "ok"
    assert outcome.Outcome(**rows, not_shown=["graphs"]).status == "not shown here"
    assert outcome.Outcome(**rows, failures=["it differs"], not_shown=["graphs"]).record()["reason"] == "it differs"
    # A loss that became NaN must not cost the report.
    outcome.write_json(tmp_path / "a.json", {"apart": float("nan"), "times": (1.0, float("inf"))})
    assert json.loads((tmp_path / "a.json").read_text()) == {"apart": "nan", "times": [1.0, "inf"]}
    # A piece that was run by another torch is run again.
    before = {"status": "failed", "torch": "2.11.0", "devices": [1]}
    about = {"torch": "2.11.0", "devices": [1]}
    assert _stands(before, about, None)
    assert not _stands(before, about, "all")
    assert not _stands(before, about, "failed")
    assert _stands({**before, "status": "ok"}, about, "failed")
    assert not _stands(before, {**about, "torch": "2.13.0"}, None)


def test_the_packed_wheels_are_complete_without_torch() -> None:  # O-05: they are installed one by one
    packed = {each.name for each in (*packages.ALWAYS, *packages.FOR_DEEPSPEED)}
    assert not [name for name in packed if re.match("torch$|nvidia|triton", name)]
    with_torch = {"torch", "setuptools"}
    for name in packed:
        for requirement in importlib.metadata.requires(name) or []:
            needed, _, condition = requirement.partition(";")
            if "extra ==" in condition or re.search(r"platform|python_version\s*<|python_full_version\s*<", condition):
                continue
            plain = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", needed)[0]).lower()  # type: ignore[index]
            assert plain in packed | with_torch, f"{name} needs {plain}"


def test_a_machine_with_torch_alone_gets_packages_and_strategy_names(tmp_path: Path, monkeypatch: Any) -> None:  # O-05
    monkeypatch.setattr(packages, "SITE", tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert packages.provide(None) == []
    (described,) = importlib.metadata.distributions(path=[str(tmp_path)])
    project = tomllib.loads((packages.ROOT / "pyproject.toml").read_text())["project"]
    assert described.version == importlib.metadata.version("drivetrain")
    found = {(point.group, point.name, point.value) for point in described.entry_points}
    points = project["entry-points"]
    assert found == {(group, *point) for group, named in points.items() for point in named.items()}
    least = {each.name: each.least for each in packages.ALWAYS}
    for requirement in project["dependencies"]:
        name, _, version = requirement.partition(">=")
        assert name == "torch" or least[name] == version
    # A package that is too old counts as missing.
    assert packages.Needed("pytest", "8.3").is_there()
    assert not packages.Needed("pytest", "8000.1").is_there()
    assert not packages.Needed("no-such-package").is_there()
