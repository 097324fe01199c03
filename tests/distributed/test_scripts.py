"""Scripts on several processes: started again, under torchrun, failing. Rows A-02, A-03, A-08, G-01, G-04, G-07."""

from __future__ import annotations

import pytest
from scripts import TORCHRUN, Run, run_cases

_AGAIN = """
class Failing(Model):
    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank in self.ranks:
            raise ValueError(f"boom on {self.global_rank}")
        return super().training_step(batch, batch_idx)

def near(module, epochs=1):
    reference = weights(train_by_hand(Model(), global_batches(64, 8) * epochs))
    return torch.allclose(weights(module), reference, atol=1e-6)

if CASE != "waits":
    began = time.monotonic()
    for ranks in ((1,), (0,), (0, 1)):
        with failing() as error:
            quiet(strategy="ddp", devices=2).fit(Failing(ranks), loader(64, 4))
        text = error["text"].splitlines()
        say(ranks, error["type"], text[0], "in training_step" in error["text"])
        say(ranks, "python prints errors", sys.excepthook is sys.__excepthook__)
        module = Model()
        quiet(strategy="ddp", devices=2).fit(module, loader(64, 4))
        say(ranks, "again", near(module))
    say("seconds", time.monotonic() - began < 20)
"""

_BY_ITSELF = """
before = dict(os.environ)
handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
if CASE == "waits":
    fit = quiet(strategy="ddp", devices=2, max_epochs=2)
    if fit.is_global_zero:
        print("before")
    fit.print("also before")
    class Slow(Model):
        def on_train_epoch_end(self):
            time.sleep(2.5 * (self.global_rank == 0 and self.current_epoch == 1))
    fit.fit(Slow(), loader(24, 4), loader(24, 4))
    fit.print("after", fit.global_step, fit.current_epoch, fit.samples_seen)
    sys.exit()
module = Model()
fit = quiet(strategy="ddp", devices=2)
fit.fit(module, loader(64, 4), loader(18, 4))
say("first", near(module), fit.global_step, fit.world_size)
second = quiet(strategy="ddp", devices=2)
second.fit(module, loader(64, 4))
say("second", near(module, epochs=2))
(validated,), (tested,) = second.validate(module, loader(18, 4)), second.test(module, loader(18, 4))
say("evaluated", validated == tested, f"{validated['val_loss']:.5f}")
predicted = sum(second.predict(module, loader(18, 4)), [])
say("predicted", predicted == loader(18, 18).dataset.tensors[0][:, 0].tolist())
alone = Model()
single = quiet(devices=1)
single.fit(alone, loader(64, 8))
say("alone", near(alone), single.world_size)
with failing() as error:
    quiet(strategy="ddp", devices=3).fit(module, loader(64, 4))
say("refused", error["type"], error["text"].splitlines()[0])
any_size = quiet()
any_size.fit(module, loader(64, 4))
say("auto", any_size.world_size, any_size.strategy.name)
say("environment", {key for key in before | os.environ if before.get(key) != os.environ.get(key)} or "same")
say("handlers", handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)])
names = [name for name in ("RANK", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS") if name in os.environ]
say("started", sys.flags.utf8_mode, *names)
if fit.is_global_zero:
    with failing() as error:
        fit.validate(module, loader(16, 4))
    say("validates", error["type"], error["text"].splitlines()[0])
"""

_JOINED = """
import torch.distributed as dist
before = dict(os.environ)
for number in range(2):
    module = Model()
    fit = quiet()
    fit.fit(module, loader(64, 4), loader(18, 4))
    say(number, near(module), fit.world_size, dist.is_initialized())
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


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A script that is started again for the second rank."""
    return run_cases(tmp_path_factory.mktemp("script"), _AGAIN + _BY_ITSELF, ["several calls", "waits"], "-X", "utf8")


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return run_cases(tmp_path_factory.mktemp("script"), _AGAIN + _JOINED, ["several calls"], *TORCHRUN)


def test_every_rank_runs_the_whole_script(by_itself: dict[str, Run]) -> None:
    run = by_itself["several calls"]
    assert run.code == 0, run.errors
    for rank in (0, 1):
        said = [line.removeprefix(f"{rank} ") for line in run.said if line.startswith(f"{rank} ")]
        assert any(line.startswith("evaluated True") for line in said)
        refusal = "3 processes are asked for, and this script runs in 2."
        assert f"refused ConfigurationError {refusal}" in said
        expected = {"first True 8 2", "second True", "predicted True", "alone True 1", "auto 2 ddp"}
        started = "started 1 RANK TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS" if rank else "started 1"
        assert expected | {"environment same", "handlers True", started} <= {*said}, said
    assert run.out.count("validate: val_loss") == 1  # only rank 0 prints


def test_a_validation_on_rank_0_alone_after_fit_is_refused(by_itself: dict[str, Run]) -> None:  # A-08, G-04
    (line,) = [line for line in by_itself["several calls"].said if line.startswith("0 validates DistributedError")]
    assert "rank 1 has already left the script" in line


def test_prints_of_rank_0_appear_once_and_waiting_is_silent(by_itself: dict[str, Run]) -> None:
    run = by_itself["waits"]
    assert run.code == 0, run.errors
    assert run.out.splitlines() == ["before", "also before", "after 6 2 48"]
    assert [line.partition(":")[0] for line in run.errors.splitlines()] == ["Precision 32-true", "The run ended"]


def test_torchruns_processes_are_joined(under_torchrun: dict[str, Run]) -> None:
    run = under_torchrun["several calls"]
    assert run.code == 0, run.errors
    for rank in (0, 1):
        refused = [f"{devices} devices ConfigurationError" for devices in (1, 3)]
        for line in ("0 True 2 False", "1 True 2 False", *refused, "own True True"):
            assert f"{rank} {line}" in run.said, run.said


@pytest.mark.parametrize("launched", ["by_itself", "under_torchrun"])
def test_after_a_failure_the_same_processes_fit_again(launched: str, request: pytest.FixtureRequest) -> None:
    # G-01, G-07
    run: Run = request.getfixturevalue(launched)["several calls"]
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
