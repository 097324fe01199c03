"""Scripts on several processes: started again, under torchrun, failing. Rows A-02, A-03, A-08, G-01, G-04, G-07."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import TORCHRUN, Run, run_cases

_AGAIN = """
from small_runs import refusal, trained

BEFORE = dict(os.environ)
TWO = {"strategy": "ddp", "devices": 2}

class Failing(Model):
    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank in self.ranks:
            raise ValueError(f"boom on {self.global_rank}")
        return super().training_step(batch, batch_idx)

def near(found, epochs=1):
    reference = weights(train_by_hand(Model(), global_batches(64, 8) * epochs))
    return torch.allclose(found, reference, atol=1e-6)

if CASE == "several calls":
    began = time.monotonic()
    for ranks in ((1,), (0,), (0, 1)):
        error = refusal(Failing(ranks), loader(64, 4), **TWO)
        told = f"RankFailedError: Rank {ranks[0]} failed with ValueError: boom on {ranks[0]}"
        assert error.startswith(f"ValueError: boom on {RANK}" if RANK in ranks else told), error
        assert ("in training_step" in error) == (RANK not in ranks), error
        assert sys.excepthook is sys.__excepthook__
        assert near(trained(Model(), loader(64, 4), **TWO)), ranks  # the same processes fit again
    assert time.monotonic() - began < 20
"""

_BY_ITSELF = """
fit = quiet(**TWO, max_epochs=2)
if CASE == "waits":
    if fit.is_global_zero:
        print("before")
    fit.print("also before")
    class Slow(Model):
        def on_train_epoch_end(self):
            time.sleep(2.5 * (self.global_rank == 0 and self.current_epoch == 1))
    fit.fit(Slow(), loader(24, 4), loader(24, 4))
    fit.print("after", fit.global_step, fit.current_epoch, fit.samples_seen)
    sys.exit()
handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
module = Model()
fit.fit(module, loader(64, 4), loader(18, 4))
assert (near(weights(module), 2), fit.global_step, fit.world_size) == (True, 16, 2)
assert near(trained(module, loader(64, 4), **TWO), 3)
fit = quiet(**TWO)
assert fit.validate(module, loader(18, 4)) == fit.test(module, loader(18, 4))
assert sum(fit.predict(module, loader(18, 4)), []) == loader(18, 18).dataset.tensors[0][:, 0].tolist()
assert near(trained(Model(), loader(64, 8), devices=1))
error = refusal(module, loader(64, 4), strategy="ddp", devices=3)
assert error.startswith("ConfigurationError: 3 processes are asked for, and this script runs in 2."), error
fit = quiet()
fit.fit(module, loader(64, 4))
assert (fit.world_size, fit.strategy.name) == (2, "ddp")
assert os.environ == BEFORE
assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
names = [name for name in ("RANK", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS") if name in BEFORE]
say("started", sys.flags.utf8_mode, *names)
if fit.is_global_zero:
    with failing() as error:
        fit.validate(module, loader(16, 4))
    say("validates", error["type"], error["text"].splitlines()[0])
"""

_JOINED = """
import torch.distributed as dist
from drivetrain_strategies import DDPStrategy

def assert_refused(told, **settings):
    error = refusal(module, loader(64, 4), **settings)
    assert error.startswith("ConfigurationError") and told in error, error

for _ in range(2):
    module, fit = Model(), quiet()
    fit.fit(module, loader(64, 4), loader(18, 4))
    assert (near(weights(module)), fit.world_size, dist.is_initialized()) == (True, 2, False)
for devices in (1, 3):
    assert_refused(f"{devices}", devices=devices)
# The user's own group, created as is usual under torchrun, is used and kept.
dist.init_process_group("gloo")
group, groups = dist.group.WORLD, {*dist.distributed_c10d._world.pg_map}
for settings in ({}, {"strategy": "ddp"}):
    assert near(trained(Model(), loader(64, 4), **settings))
assert refusal(Failing((0, 1)), loader(64, 4)) == f"ValueError: boom on {RANK}"
assert_refused("1", devices=1)
assert_refused("2 processes", devices=3)
assert_refused("'nccl'", strategy=DDPStrategy(process_group_backend="nccl"))
assert (dist.group.WORLD, {*dist.distributed_c10d._world.pg_map}) == (group, groups)
dist.all_reduce(total := torch.ones(()))
assert total == 2
assert os.environ == BEFORE
dist.destroy_process_group()
say("done")
"""


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A script that is started again for the second rank."""
    cases = ["several calls", "waits"]
    return run_cases(tmp_path_factory.mktemp("script"), _AGAIN + _BY_ITSELF, cases, "-X", "utf8")


def test_every_rank_runs_the_whole_script_and_fits_again_after_failures(by_itself: dict[str, Run]) -> None:
    # G-01, G-07
    run = by_itself["several calls"]
    assert run.code == 0, run.errors
    caller, alone, other = run.reported
    assert caller == "0 started 1"
    assert other == "1 started 1 RANK TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS"
    assert run.out.count("validate: val_loss") == 1  # only rank 0 prints
    # A-08, G-04: a validation on rank 0 alone
    assert alone.startswith("0 validates DistributedError")
    assert "rank 1 has already left the script" in alone


def test_prints_of_rank_0_appear_once_and_waiting_is_silent(by_itself: dict[str, Run]) -> None:
    run = by_itself["waits"]
    assert run.code == 0, run.errors
    assert run.out.splitlines() == ["before", "also before", "after 6 2 48"]
    assert [line.partition(":")[0] for line in run.errors.splitlines()] == ["Precision 32-true", "The run ended"]


def test_torchruns_processes_are_joined_and_fit_after_failures(tmp_path: Path) -> None:  # G-01, G-07
    run = run_cases(tmp_path, _AGAIN + _JOINED, ["several calls"], *TORCHRUN)["several calls"]
    assert run.code == 0, run.errors
    assert run.reported == ["0 done", "1 done"]
