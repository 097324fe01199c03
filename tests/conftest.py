"""What every test starts from, and what none may leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# Before torch is imported, and for the processes that tests start: few cores are shared by several ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Settings of the machine that runs the tests are not part of them.
for _name in [name for name in os.environ if name.startswith("DRIVETRAIN_")]:
    del os.environ[_name]

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal a file's tests to one process, and all of parity's: they read the same runs."""
    from xdist.scheduler import LoadFileScheduling

    class ByRuns(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/parity" if nodeid.startswith("tests/parity/") else super()._split_scope(nodeid)

    return ByRuns(config, log)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process group, an environment variable or a default dtype behind (A-02, A-03)."""
    environment = dict(os.environ)
    dtype = torch.get_default_dtype()
    yield
    left = []
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        left.append("a default process group")
    if torch.get_default_dtype() != dtype:
        torch.set_default_dtype(dtype)
        left.append("another default dtype")
    names = {
        name
        for name in environment.keys() | os.environ.keys()
        # Torch's optimizers import dynamo at their first step, which sets the second one for the process.
        if name not in ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
        and environment.get(name) != os.environ.get(name)
    }
    if names:
        for name in names:
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]
        left.append(f"changed environment variables: {', '.join(sorted(names))}")
    assert not left, f"this test left behind {'; '.join(left)}"
