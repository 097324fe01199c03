"""Two jobs with the same port: the first one continues, the other one is refused. J-05, with real processes."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from pathlib import Path

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import FunctionLauncher, current_world
from drivetrain.testing import run_distributed


def _meet() -> str:
    world = current_world()
    assert world is not None
    world.store("test").set(os.environ["RANK"], "here")
    world.store("test").wait(["0", "1"])
    return os.environ["RANK"]


def _node_of_two(folder: str, port: int) -> str:
    """Start node 0, a node 1 of another job, and node 1, each of which starts its own process."""
    number = int(os.environ["RANK"])
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "GROUP", "ROLE"))]:
        del os.environ[name]
    os.environ["TORCHELASTIC_RUN_ID"] = "B" if number == 1 else "A"
    while number == 2 and not Path(folder, "refused").exists():
        time.sleep(0.01)
    node = min(number, 1)
    try:
        return str(FunctionLauncher("fork").launch(Placement(node, 2, 0, 1, node, 2), _meet, port=port))
    except ConfigurationError as error:
        Path(folder, "refused").touch()
        return str(error)


def test_a_node_of_another_job_is_refused_and_the_jobs_own_node_admitted(tmp_path: Path) -> None:  # J-05
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    first, other, second = run_distributed(_node_of_two, 3, str(tmp_path), port, process_group=None)
    assert (first, second) == ("0", "1")
    assert f"rank 1 connected to 127.0.0.1:{port}, where the processes of another job meet" in other
