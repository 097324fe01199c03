"""Which CUDA device a run selects and restores, tested by the order of calls to a mock: O-02, O-03."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError
from drivetrain._engine.assembly.strategy_checks import refuse_shared_devices
from drivetrain._runtime import accelerators, process_state
from drivetrain._runtime.generators import generator_states, restore_generators
from drivetrain._runtime.process_state import ProcessState
from drivetrain.environments import Placement
from drivetrain.precision import resolve_precision
from drivetrain_strategies import SingleDeviceStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)


def test_a_strategy_selects_its_device(monkeypatch: pytest.MonkeyPatch) -> None:  # O-02
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        strategy = SingleDeviceStrategy()
        strategy.bind(Placement(), device, resolve_precision("32-true", torch.device("cpu")), None)
        strategy.setup_environment()
    assert taken == [torch.device("cuda", 1)]


@pytest.mark.parametrize("used_before", [False, True])
def test_a_run_restores_the_device(used_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # O-02, A-03
    at_hand = [2 if used_before else 0]
    in_use = [used_before]
    monkeypatch.setattr(process_state, "_cuda_is_in_use", lambda: in_use[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: at_hand[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: at_hand.__setitem__(0, device))
    with ProcessState():
        in_use[0] = True
        torch.cuda.set_device(1)
    assert at_hand == [2 if used_before else 0]


@pytest.mark.parametrize("before", [None, "0"])
def test_devices_are_counted_through_nvml(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:  # O-03
    # torch.cuda.is_available() may initialise the driver, which a forked process cannot use.
    name, asked = "PYTORCH_NVML_BASED_CUDA_CHECK", []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(os.environ.get(name)))
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    assert accelerators.resolve_devices("auto", 1).type in ("cpu", "mps")
    assert asked == ["1"]
    assert os.environ.get(name) == before


def test_two_ranks_on_one_device_are_refused_by_name() -> None:  # O-03
    refuse_shared_devices(["a", "b", "c"])
    with pytest.raises(ConfigurationError, match=r"Ranks 1, 3 are on one GPU \(b\)"):
        refuse_shared_devices(["a", "b", "c", "b"])


def _local_ranks_for_deepspeed(cases: list[tuple[torch.device, str | None]]) -> list[tuple[str | None, str | None]]:
    """Return LOCAL_RANK within DeepSpeed's world and after it, by the run's device and LOCAL_RANK before."""
    found = []
    with ProcessState():  # DeepSpeed sets variables of its own
        import deepspeed

        from drivetrain_strategies.deepspeed._cleanup import communication

        for device, before in cases:
            os.environ.pop("LOCAL_RANK", None)
            if before is not None:
                os.environ["LOCAL_RANK"] = before
            with communication(deepspeed, device, 0):
                seen = os.environ.get("LOCAL_RANK")
            found.append((seen, os.environ.get("LOCAL_RANK")))
    return found


def test_deepspeed_uses_the_device_of_the_run() -> None:  # O-03
    # By default it uses the device of LOCAL_RANK: a wrong one with devices=[1, 3], and none if each task sees one GPU.
    cases = [(torch.device("cpu", 3), "1"), (torch.device("cpu"), "1"), (torch.device("cpu"), None)]
    assert on_ranks(_local_ranks_for_deepspeed, 1, cases) == [[("3", "1"), ("1", "1"), ("0", None)]]


def test_an_unused_accelerator_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for there in (False, True):
        monkeypatch.setattr(torch.xpu, "is_available", lambda there=there: there)
        assert accelerators.resolve_devices("auto", 1).type == "cpu"
        assert ("torch sees an XPU" in caplog.text) is there


def test_the_mps_generator_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    state = [torch.tensor([7])]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: state[0].clone())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda kept: state.__setitem__(0, kept))
    kept = generator_states(torch.device("mps"))
    for device, expected in (("cpu", 8), ("mps", 7)):
        state[0] = torch.tensor([8])
        restore_generators(kept, torch.device(device))
        assert state[0].item() == expected
