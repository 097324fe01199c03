"""Runs on a local Ray cluster: their results and failures. Rows A-02, A-06, B-01, G-01, G-02, G-07."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_runs import Counting, Regression, global_batches, loader, quiet, train_by_hand, weights

from drivetrain import Fit
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import RankFailedError, RayLauncher

ray = pytest.importorskip("ray", reason="needs ray: pip install -c constraints.txt -e '.[ray]'")


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    environment = dict(os.environ)
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(environment)


class Model(Regression):
    steps: torch.Tensor

    def __init__(self, how: str = "trains") -> None:
        super().__init__()
        self.how = how
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        if batch_idx == 3 and self.global_rank == 1:
            if self.how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raises":
                raise ValueError("boom on 1")
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss


def _fit(**settings: Any) -> Fit:
    launcher = RayLauncher({"CPU": 0.5}, grace=1.0, placement_timeout=5.0)
    return quiet(**{"strategy": "ddp", "devices": 2, "launcher": launcher, **settings})


def _cores_come_back() -> bool:
    """Return whether all cores of the cluster are free again; Ray updates this a moment after an actor has ended."""
    until = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 2.0 and time.monotonic() < until:
        time.sleep(0.1)
    return bool(ray.available_resources().get("CPU") == 2.0)


def test_a_run_on_ray_returns_its_results() -> None:  # B-01
    counting, module = Counting(), Model()
    fit = _fit(callbacks=[counting])
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    fit.fit(module, loader(64, 4))
    reference = train_by_hand(Regression(), global_batches(64, 8))
    assert torch.allclose(weights(module), weights(reference), atol=1e-6)
    assert int(module.steps) == counting.batches == fit.global_step == 8
    assert (fit.world_size, fit.state, "loss_epoch" in fit.callback_metrics) == (2, "finished", True)
    assert ray.is_initialized()  # the caller's cluster is unchanged
    assert _cores_come_back()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize(
    ("how", "told"), [("raises", "Rank 1 failed with ValueError: boom on 1"), ("is killed", "Rank 1 died: ")]
)
def test_an_actor_that_fails_is_named(how: str, told: str) -> None:  # G-01, G-02, G-07
    with pytest.raises(RankFailedError, match=told) as caught:
        _fit().fit(Model(how), loader(64, 4))
    if how == "raises":
        assert "in training_step" in str(caught.value)
        assert isinstance(caught.value.failure.load_error(), ValueError)
    assert caught.value.failure.rank == 1


def test_unavailable_resources_are_refused() -> None:  # A-06, G-06
    with pytest.raises(ConfigurationError, match=r"(?s)no room within 5 s for 1 node.*9 worker.*'CPU': 2"):
        _fit(devices=9).fit(Model(), loader(64, 4))
    with pytest.raises(ConfigurationError, match=r"(?s)devices='auto' with launcher='ray'.*devices=2"):
        _fit(devices="auto").fit(Model(), loader(64, 4))


def test_several_devices_within_a_task_are_refused() -> None:  # G-01
    search = sys.path

    @ray.remote  # type: ignore[untyped-decorator]  # Ray brings it with what it refers to; this file is one that its worker does not find
    def on_two_devices() -> str:
        sys.path[:] = search
        from small_runs import Regression, loader, refusal

        return refusal(Regression(), loader(64, 4), strategy="ddp", devices=2)

    told = ray.get(on_two_devices.remote(), timeout=120)
    assert told.startswith("ConfigurationError: a task or actor of Ray, such as a trial of Ray Tune, requests several")
    assert "devices=1" in told
