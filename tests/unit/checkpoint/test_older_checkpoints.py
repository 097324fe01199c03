"""Checkpoints that an earlier version wrote (``older/``): a run still resumes from them.

PYTHONPATH=tests python tests/unit/checkpoint/test_older_checkpoints.py FOLDER  # writes one of each kind
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import quiet
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, TrainModule
from drivetrain.callbacks import Checkpoint, EarlyStopping
from drivetrain.checkpoint import load, verify
from drivetrain.testing import run_distributed
from worlds import on_ranks

OLDER = Path(__file__).parent / "older"
DROPOUT: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}
"""Sums over two ranks may differ in order between processors; dropout masks are bit-identical."""

SAVED_AT = 5  # of 8 steps: in the middle of the second epoch

KINDS = {"single_device": 1, "ddp": 2, "fsdp": 2, "deepspeed_stage_1": 2}
"""Strategies, and the number of ranks on which each wrote its checkpoint."""


class Tiny(TrainModule):
    """Dropout draws from the generators, a buffer counts steps, a weight is tied, and a layer is frozen."""

    steps: torch.Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(3, width)
            self.net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.25), nn.Linear(width, width))
            self.last = nn.Linear(width, 1)
        self.net[3].weight = self.net[0].weight
        self.first.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.last(self.net(self.first(x))) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        groups = [
            {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Counts(Callback):
    """A callback with state: a tuple and a tensor. It may save in the middle of the run."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.seen: tuple[int, ...] = ()
        self.norm = torch.zeros(())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = (*self.seen, batch_idx)
        self.norm = self.norm + 1
        if self.path is not None and trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "norm": self.norm}

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen, self.norm = state_dict["seen"], state_dict["norm"]


def run(strategy: str, start: Path | None = None, out: Path | None = None) -> Any:
    """Train for two epochs of four steps on 16 samples, 4 a step over all ranks, and save into ``out`` if given."""
    ranks = KINDS[strategy]
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator))
    module, counts = Tiny(), Counts(None if out is None else out / strategy)
    callbacks: list[Callback] = [counts, EarlyStopping("val", patience=50)]
    callbacks += [] if out is None else [Checkpoint(out / f"{strategy}-kept", monitor="val", every_n_epochs=1)]
    settings: dict[str, Any] = {"max_epochs": 2, "seed": 3, "num_sanity_val_steps": 0}
    settings |= {"devices": 1 if ranks == 1 else "auto", "enable_checkpointing": out is not None}
    fit = quiet(strategy=strategy, callbacks=callbacks, **settings)
    loader = DataLoader(data, batch_size=4 // ranks, shuffle=True)
    fit.fit(module, loader, DataLoader(data, batch_size=4 // ranks), ckpt_path=start)
    return {name: value.clone() for name, value in module.state_dict().items()}, counts.seen, fit.global_step


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_checkpoint_is_read_and_resumed_with_the_same_results(kind: str) -> None:  # F-01
    checkpoint = load(OLDER / kind)
    assert verify(OLDER / kind) == []
    assert checkpoint.progress["global_step"] == SAVED_AT
    assert checkpoint.hyper_parameters == {"width": 4}
    assert {"last.weight", "net.0.weight", "steps"} <= set(checkpoint.weights())
    assert checkpoint.optimizer_state()["param_groups"][0]["weight_decay"] == 0.1
    ended = load_file(OLDER / "ended.safetensors")
    expected = {name.partition("/")[2]: value for name, value in ended.items() if name.startswith(f"{kind}/")}
    arguments = kind, OLDER / kind
    weights, seen, global_step = run(*arguments) if KINDS[kind] == 1 else on_ranks(run, KINDS[kind], *arguments)[0]
    assert global_step == 8
    assert seen == (0, 1, 2, 3, 0, 1, 2, 3)
    torch.testing.assert_close(weights, expected, **DROPOUT)


if __name__ == "__main__":
    from test_older_checkpoints import run as run_on_a_rank  # the name under which spawned ranks can import it

    out = Path(sys.argv[1])
    out.mkdir(parents=True)
    ended: dict[str, torch.Tensor] = {}
    for kind, count in KINDS.items():
        weights = (
            run(kind, None, out)[0] if count == 1 else run_distributed(run_on_a_rank, count, kind, None, out)[0][0]
        )
        ended |= {f"{kind}/{name}": value for name, value in weights.items()}
    save_file(ended, out / "ended.safetensors")
