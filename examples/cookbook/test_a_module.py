"""Testing a module with pytest: the module runs, can learn, gives the same result on two ranks, and can be resumed.

    pytest examples/cookbook/test_a_module.py

Common mistake: comparing a run on two ranks with a single-process run of the same `batch_size`. A loader's batch size
is per rank, so two ranks with 8 make the same steps as one process with 16. Also, ranks are separate processes, which
import the function that they run. Define the function at the top level of a file, with arguments and results that can
be pickled.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule, seed_everything
from drivetrain.testing import assert_close_states, assert_equal_ranks, run_distributed


class Classifier(TrainModule):  # in your project: from your_package import Classifier
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def loader(batch_size: int) -> DataLoader:
    x = torch.randn(
        52, 8, generator=torch.Generator().manual_seed(0)
    )  # 52 samples, not a multiple of any batch size below
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size, shuffle=True)


def fit_classifier(batch_size: int, ckpt_path=None, **options) -> tuple[Fit, Classifier]:
    seed_everything(0)
    fit, module = Fit(accelerator="cpu", seed=0, logger=False, **options), Classifier()
    fit.fit(module, loader(batch_size), loader(batch_size), ckpt_path=ckpt_path)
    return fit, module


def weights_of_two_ranks() -> dict[str, torch.Tensor]:
    return fit_classifier(8, devices=2, strategy="ddp", max_epochs=2, enable_checkpointing=False)[1].state_dict()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs write to the working directory


def test_every_step_and_hook_runs():
    fit_classifier(8, fast_dev_run=True)


def test_it_overfits_one_batch():
    fit, _ = fit_classifier(8, overfit_batches=1, max_epochs=100, enable_checkpointing=False, log_every_n_steps=1)
    assert fit.callback_metrics["loss"] < 0.01


def test_two_ranks_match_one_process():
    ranks = run_distributed(weights_of_two_ranks, 2, process_group=None)
    assert_equal_ranks(ranks)
    _, single = fit_classifier(16, max_epochs=2, enable_checkpointing=False)  # 2 x 8
    assert_close_states(ranks[0], single.state_dict(), atol=1e-6)


def test_resumed_run_matches_uninterrupted_run():
    stopped, _ = fit_classifier(8, max_steps=10)
    _, resumed = fit_classifier(8, ckpt_path=stopped.checkpoint_callback.last_model_path, max_steps=20)
    _, uninterrupted = fit_classifier(8, max_steps=20)
    assert_close_states(resumed.state_dict(), uninterrupted.state_dict(), atol=0, rtol=0)
