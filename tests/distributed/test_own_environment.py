"""Third-party environments, written with public names only, place ranks like the built-in ones. K-03."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import run_cases
from small_runs import Regression, global_batches, loader, quiet, train_by_hand, weights

from drivetrain import ConfigurationError
from drivetrain.environments import Environment, Placement
from drivetrain_strategies import SingleDeviceStrategy

# A scheduler with variables of its own: two processes, each with its number.
_FARM = """
import os, subprocess, sys
shared = {**os.environ, "FARM_WORKERS": "2"}
workers = [subprocess.Popen(sys.argv[1:], env={**shared, "FARM_WORKER": number}) for number in "01"]
sys.exit(max(worker.wait() for worker in workers))
"""

_ENVIRONMENT = """
from drivetrain.environments import Environment, Placement

class Farm(Environment):
    def placement(self):
        worker, workers = self.variables.integer("FARM_WORKER"), self.variables.integer("FARM_WORKERS")
        return Placement(worker, workers, worker, workers)

    @property
    def main_port(self):
        return self.variables.integer("FARM_PORT")
"""

_SCRIPT = """
from farm import Farm

RANK = int(os.environ["FARM_WORKER"])
reference = weights(train_by_hand(Model(), global_batches(64, 8)))
for environment in (Farm(), "farm"):
    module = Model()
    fit = quiet(strategy="ddp", environment=environment)
    before = fit.global_rank
    fit.fit(module, loader(64, 4))
    near = torch.allclose(weights(module), reference, atol=1e-6)
    say("trained", near, before, fit.global_rank, fit.local_rank, fit.world_size)
with failing() as caught:
    quiet(strategy="ddp", environment="farm", devices=3).fit(Model(), loader(64, 4))
say("refused", caught["text"].splitlines()[0])
with failing() as caught:
    os.environ.pop("FARM_WORKERS")
    quiet(strategy="ddp", environment="farm").fit(Model(), loader(64, 4))
say("refused", caught["text"].splitlines()[:2])
"""


def test_ranks_of_a_third_party_scheduler_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "start.py").write_text(_FARM)
    (tmp_path / "farm.py").write_text(_ENVIRONMENT)
    info = tmp_path / "farm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: farm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drivetrain.environments]\nfarm = farm:Farm\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("FARM_PORT", str(free.getsockname()[1]))
    starter = (sys.executable, str(tmp_path / "start.py"))
    run = run_cases(tmp_path, _SCRIPT, ["farm"], starter=starter)["farm"]
    assert run.code == 0, run.errors
    refused = ["devices x num_nodes = 3, and Farm has 2 processes.", "FARM_WORKERS is not set"]
    refused += ["Farm was detected or chosen as the environment"]
    for rank in (0, 1):
        said = [line.removeprefix(f"{rank} ") for line in run.said if line.startswith(f"{rank} ")]
        assert said.count(f"trained True {rank} {rank} {rank} 2") == 2, run.said
        assert all(any(text in line for line in said) for text in refused), run.said


class Desk(Environment):
    """An environment that is not a cluster, and reports so."""

    started_processes = False

    def placement(self) -> Placement:
        return Placement()


@pytest.mark.parametrize("environment", [Desk(), "plain"])
def test_missing_processes_are_started(environment: Any) -> None:
    module = Regression()
    fit = quiet(strategy="ddp", devices=2, launcher="fork", environment=environment)
    fit.fit(module, loader(16, 4))
    assert weights(module).allclose(weights(train_by_hand(Regression(), global_batches(16, 8))), atol=1e-6)
    assert (fit.world_size, fit.environment) == (2, environment)


def test_only_several_nodes_require_the_node_rank() -> None:
    fit = quiet(devices=1, environment=Desk())
    fit.fit(Regression(), loader(16, 4))
    assert fit.world_size == 1
    told = r"(?s)num_nodes=2 with environment='Desk'.*Desk.first_placement_on_node"
    with pytest.raises(ConfigurationError, match=told):
        quiet(strategy="ddp", devices=1, num_nodes=2, environment=Desk()).fit(Regression(), loader(16, 4))


def test_a_strategy_for_one_process_is_refused_by_its_own_name() -> None:
    alone = type("Alone", (SingleDeviceStrategy,), {"name": "alone"})
    with pytest.raises(ConfigurationError, match=r"strategy='alone' with 2 devices"):
        quiet(strategy=alone(), devices=2).fit(Regression(), loader(16, 4))
