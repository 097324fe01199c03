"""Settings for every test, and checks for what tests leave behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before torch is imported, and for subprocesses of tests: several ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The machine's own settings must not affect the tests.
for _name in [name for name in os.environ if name.startswith("DRIVETRAIN_")]:
    del os.environ[_name]
# Subprocesses of tests may keep the bytecode that they compile. Tests that set PYTHONPATH set it to this process's
# search path.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
_INTERPRETERS = str(Path(__file__).parent / "interpreters")
if _INTERPRETERS not in sys.path:
    sys.path.append(_INTERPRETERS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_INTERPRETERS, os.environ.get("PYTHONPATH")]))

import pytest  # noqa: E402
import torch  # noqa: E402

import sizes  # noqa: E402
from drivetrain.testing._leak_checks import ProcessSnapshot  # noqa: E402
from faulty_store import FaultyStore  # noqa: E402
from worlds import DEEPSPEED, close_worlds, preload  # noqa: E402

# Tests compare runs with loops on the CPU, and start processes by fork. Those that need a GPU run in `make cuda`.
if torch.version.cuda is not None and "GPUS_IN_TESTS" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

torch.set_num_threads(1)
# Weights may differ between sessions. The seed prevents the warning about an unseeded process (I-18) in tests' runs.
torch.manual_seed(torch.seed() % 2**32)


_ORDER = ("tests/parity/", "tests/distributed/", "tests/fuzz/", "tests/faults/", "tests/unit/test_", "tests/unit/")
"""What takes long goes first, so that no process is left with a long file when the other has nothing to do."""

_STRATEGY = re.compile(r"\[(?:\d+-\d+-)?([a-z][a-z_ 0-9]*)")


def pytest_addoption(parser: pytest.Parser) -> None:
    sizes.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(sizes.Sizes(), "sizes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((at for at, part in enumerate(_ORDER) if item.nodeid.startswith(part)), -1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign a file's tests to one process, and likewise those of a strategy in the parity matrix: they share runs."""
    from xdist.scheduler import LoadFileScheduling

    class ByRuns(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            strategy = _STRATEGY.search(nodeid) if nodeid.startswith("tests/parity/") else None
            if strategy is None:
                return super()._split_scope(nodeid)
            return f"tests/parity/{strategy[1].replace(' ', '_')}"

    config.option.loadscopereorder = False  # keep the order above instead of ordering files by their number of tests
    return ByRuns(config, log)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process group, an environment variable or a default dtype behind (A-02, A-03).

    The ranks of a `World` perform the same check after each call.
    """
    surroundings = ProcessSnapshot()
    yield
    left = surroundings.restore()
    assert not left, f"this test left behind {'; '.join(left)}"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    # Private: the pauses between retries cannot be set.
    monkeypatch.setattr("drivetrain._storage.retries.PAUSES", (0.01, 0.01))
    return FaultyStore(tmp_path / "store").mount()


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("deepspeed" in item.nodeid for item in session.items) and importlib.util.find_spec("deepspeed"):
        preload(*DEEPSPEED)
    gc.freeze()  # Nothing imported so far is garbage, so collections need not examine it.
    gc.set_threshold(700, 10, 10)  # Python's defaults, for code in this process.


def pytest_sessionfinish() -> None:
    close_worlds()
