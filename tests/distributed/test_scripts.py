"""Scripts on several processes: started again, under torchrun, failing. Rows A-02, A-03, A-08, G-01, G-02, G-07."""

from __future__ import annotations

import pytest
from scripts import TORCHRUN, Run, run_cases, run_script

_THROUGH = """
before = dict(os.environ)
module = Model()
fit = quiet(strategy="ddp", devices=2)
fit.fit(module, loader(64, 4), loader(18, 4))
reference = weights(train_by_hand(Model(), global_batches(64, 8)))
say("first", torch.allclose(weights(module), reference, atol=1e-6), fit.global_step, fit.world_size)
second = quiet(strategy="ddp", devices=2)
second.fit(module, loader(64, 4))
reference = weights(train_by_hand(Model(), global_batches(64, 8) * 2))
say("second", torch.allclose(weights(module), reference, atol=1e-6))
(validated,), (tested,) = second.validate(module, loader(18, 4)), second.test(module, loader(18, 4))
say("evaluated", validated == tested, f"{validated['val_loss']:.5f}")
predicted = sum(second.predict(module, loader(18, 4)), [])
say("predicted", predicted == loader(18, 18).dataset.tensors[0][:, 0].tolist())
alone = Model()
single = quiet(devices=1)
single.fit(alone, loader(64, 8))
reference = weights(train_by_hand(Model(), global_batches(64, 8)))
say("alone", torch.allclose(weights(alone), reference, atol=1e-6), single.world_size)
with failing() as error:
    quiet(strategy="ddp", devices=3).fit(module, loader(64, 4))
say("refused", error["type"], error["text"].splitlines()[0])
any_size = quiet()
any_size.fit(module, loader(64, 4))
say("auto", any_size.world_size, any_size.strategy.name)
say("environment", {key for key in before | os.environ if before.get(key) != os.environ.get(key)} or "same")
"""

_JOINED = """
import torch.distributed as dist
before = dict(os.environ)
for number in range(2):
    module = Model()
    fit = quiet()
    fit.fit(module, loader(64, 4), loader(18, 4))
    reference = weights(train_by_hand(Model(), global_batches(64, 8)))
    say(number, torch.allclose(weights(module), reference, atol=1e-6), fit.world_size, dist.is_initialized())
for devices in (1, 3):
    with failing() as error:
        quiet(devices=devices).fit(module, loader(64, 4))
    say(devices, "devices", error["type"])
# The user's own group, created as is usual under torchrun.
dist.init_process_group("gloo")
group = dist.group.WORLD
quiet().fit(Model(), loader(64, 4))
say("own", dist.group.WORLD is group, os.environ == before)
dist.destroy_process_group()
"""

_FAILING = """
class Failing(Model):
    def __init__(self, ranks, how="raises"):
        super().__init__()
        self.ranks, self.how = ranks, how
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank in self.ranks:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"boom on {self.global_rank}")
        return super().training_step(batch, batch_idx)
"""

_AGAIN = (
    _FAILING
    + """
began = time.monotonic()
for ranks in ((1,), (0,), (0, 1)):
    with failing() as error:
        quiet(strategy="ddp", devices=2).fit(Failing(ranks), loader(64, 4))
    text = error["text"].splitlines()
    say(ranks, error["type"], text[0], "in training_step" in error["text"])
    say(ranks, "python prints errors", sys.excepthook is sys.__excepthook__)
    module = Model()
    quiet(strategy="ddp", devices=2).fit(module, loader(64, 4))
    reference = weights(train_by_hand(Model(), global_batches(64, 8)))
    say(ranks, "again", torch.allclose(weights(module), reference, atol=1e-6))
say("seconds", time.monotonic() - began < 20)
"""
)

_ALONE = """
fit = quiet(strategy="ddp", devices=2)
module = Model()
fit.fit(module, loader(16, 4))
if fit.is_global_zero:
    with failing() as error:
        fit.validate(module, loader(16, 4))
    say("alone", error["type"], error["text"].splitlines()[0])
"""


@pytest.fixture(scope="module")
def started_again(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A script that is started again for the second rank, with several calls one after another."""
    return run_script(tmp_path_factory.mktemp("script"), _THROUGH + _AGAIN + _ALONE, limit=120)


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same script with both ranks started by torchrun."""
    return run_script(tmp_path_factory.mktemp("script"), _AGAIN + _JOINED, *TORCHRUN, limit=120)


def test_every_rank_runs_the_whole_script(started_again: Run) -> None:
    run = started_again
    assert run.code == 0, run.errors
    for rank in (0, 1):
        said = [line for line in run.said if line.startswith(f"{rank} ")]
        assert f"{rank} first True 8 2" in said
        assert f"{rank} second True" in said
        assert any(line.startswith(f"{rank} evaluated True") for line in said)
        assert f"{rank} predicted True" in said
        assert f"{rank} alone True 1" in said
        refusal = "3 processes are asked for, and this script runs in 2."
        assert f"{rank} refused ConfigurationError {refusal}" in said
        assert f"{rank} auto 2 ddp" in said
        assert f"{rank} environment same" in said
    assert run.out.count("validate: val_loss") == 1  # only rank 0 prints


def test_torchruns_processes_are_joined(under_torchrun: Run) -> None:
    run = under_torchrun
    assert run.code == 0, run.errors
    for rank in (0, 1):
        refused = [f"{devices} devices ConfigurationError" for devices in (1, 3)]
        for line in ("0 True 2 False", "1 True 2 False", *refused, "own True True"):
            assert f"{rank} {line}" in run.said, run.said


@pytest.mark.parametrize("launched", ["subprocess", "torchrun"])
def test_after_a_failure_the_same_processes_fit_again(launched: str, request: pytest.FixtureRequest) -> None:
    # G-01, G-07
    run: Run = request.getfixturevalue("under_torchrun" if launched == "torchrun" else "started_again")
    assert run.code == 0, run.errors
    for failed in (0, 1):
        other = 1 - failed
        told = f"RankFailedError Rank {failed} failed with ValueError: boom on {failed}"
        assert f"{failed} ({failed},) ValueError boom on {failed} False" in run.said, run.said
        assert f"{other} ({failed},) {told} True" in run.said, run.said
    for rank in (0, 1):
        assert f"{rank} (0, 1) ValueError boom on {rank} False" in run.said
        for ranks in ("(1,)", "(0,)", "(0, 1)"):
            assert f"{rank} {ranks} again True" in run.said
            assert f"{rank} {ranks} python prints errors True" in run.said
        assert f"{rank} seconds True" in run.said


_ENDS = {
    "raises": "Rank 1 failed with ValueError: boom on 1",
    "killed": "Rank 1 was killed by SIGKILL",
    "before fit": "Rank 1 failed with KeyError: 'before fit'",
    "leaves before fit": "rank 1 has already left the script",
}

_ENDING = (
    _FAILING
    + """
quiet(strategy="ddp", devices=2).fit(Model(), loader(16, 4))
if RANK == 1 and CASE == "before fit":
    raise KeyError(CASE)
if RANK == 1 and CASE == "leaves before fit":
    sys.exit()
say("second")
began = time.time()
try:
    quiet(strategy="ddp", devices=2).fit(Failing((1,), CASE), loader(64, 4))
finally:
    say("took", round(time.time() - began, 1))
"""
)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Scripts that are started again, and whose rank 1 fails in one of several ways."""
    return run_cases(tmp_path_factory.mktemp("ending"), _ENDING, list(_ENDS), limit=120)


@pytest.mark.parametrize(("how", "told"), _ENDS.items())
def test_a_script_with_a_failed_rank_ends_soon_with_the_reason(how: str, told: str, ending: dict[str, Run]) -> None:
    # G-01, G-02, A-08
    run = ending[how]
    assert run.code != 0
    assert told in run.errors, run.errors
    (took,) = [float(line.split()[-1]) for line in run.said if line.startswith("0 took")]
    assert took < 15


def test_a_validation_on_rank_0_alone_after_fit_is_refused(started_again: Run) -> None:
    assert started_again.code == 0, started_again.errors
    (line,) = [line for line in started_again.said if line.startswith("0 alone DistributedError")]
    assert "rank 1 has already left the script" in line
