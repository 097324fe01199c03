"""After a search everything is as it was before, bit for bit, whichever way the search ended."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from tuner_case import FEATURES, Data, Net, loader, quiet

from drivetrain import ConfigurationError, TrainModule
from drivetrain.callbacks import Checkpoint, LambdaCallback, LearningRateFinder
from drivetrain.loggers import CSVLogger
from drivetrain.tuner import Tuner


class NoisyDataset(Dataset[Any]):
    """Adds noise to its samples, from the global random generators and from its own."""

    def __init__(self) -> None:
        self.x = torch.randn(30, FEATURES, generator=torch.Generator().manual_seed(3))
        self.generator = np.random.default_rng(5)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(FEATURES) + random.random() + float(np.random.rand()) + float(self.generator.random())
        x = self.x[index]
        return x + 0.01 * noise, x.sum().reshape(1)


def noisy_loader(draws: str) -> Any:
    generator = torch.Generator().manual_seed(2)
    if draws == "shuffled":
        return DataLoader(NoisyDataset(), batch_size=4, shuffle=True, generator=generator)
    return DataLoader(NoisyDataset(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 30, 30, generator=generator))


def train(root: Path, draws: str, searches: int, **settings: Any) -> dict[str, Any]:
    """Train after as many searches, and return everything that a search could have changed."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    module, loaders = Net(), noisy_loader(draws)
    module.net[0].weight.requires_grad_(False)
    module.net[1].eval()
    module.net[4].bias.grad = torch.ones(1)
    batches: list[int] = []
    counting = LambdaCallback(on_train_batch_end=lambda *arguments: batches.append(arguments[-1]))
    callbacks = [counting, Checkpoint(dirpath=root / "kept")]
    fit = quiet(max_epochs=2, logger=CSVLogger(root), callbacks=callbacks, log_every_n_steps=1, **settings)
    if searches:
        found = Tuner(fit).lr_find(module, loaders, num_training=17, update_attr=False, early_stop_threshold=None)
        assert len(found.results["lr"]) == 17
        if searches == 2:
            assert Tuner(fit).scale_batch_size(module, loaders, init_val=3, max_trials=2) == 6
        assert not root.exists()
        assert (fit.state, fit.session, fit.global_step, batches) == ("idle", None, 0, [])
        assert module.losses == []
        assert module.net[4].bias.grad is not None
        assert [one.training for one in module.net] == [True, False, True, True, True]
        assert not module.net[0].weight.requires_grad
    fit.fit(module, loaders)
    (rows,) = root.rglob("metrics.csv")
    return {
        "weights": dict(module.state_dict()),
        "optimizer": fit.optimizers[0].state_dict()["state"],
        "rates": fit.lr_schedulers[0].get_last_lr(),
        "losses": module.losses,
        "metrics": dict(fit.callback_metrics),
        "counters": (fit.global_step, fit.current_epoch, fit.samples_seen, batches),
        "draws": (torch.rand(2), random.random(), float(np.random.rand()), float(loaders.dataset.generator.random())),
        "rows": rows.read_text(),
    }


@pytest.mark.parametrize(
    ("draws", "searches", "settings"),
    [
        ("shuffled", 1, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("weighted", 2, {"seed": 3, "precision": "16-mixed"}),
    ],
)
def test_a_fit_after_a_search_equals_the_fit_without_one(
    tmp_path: Path, draws: str, searches: int, settings: dict[str, Any]
) -> None:  # L-06
    plain = train(tmp_path / "plain", draws, 0, **settings)
    after = train(tmp_path / "after", draws, searches, **settings)
    assert after.pop("rows") == plain["rows"]
    for key, value in after.items():
        torch.testing.assert_close(value, plain[key], rtol=0, atol=0, msg=f"{key} differs")


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (RuntimeError("broken"), RuntimeError),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, SystemExit),
    ],
)
def test_a_search_that_fails_or_gets_a_signal_changes_nothing(
    cause: Any, kind: Any, tmp_path: Path, caplog: Any
) -> None:
    # L-06
    class FailingNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 4:
                if not isinstance(cause, signal.Signals):
                    raise cause
                os.kill(os.getpid(), cause)
            return super().training_step(batch, batch_idx)

    module, data, loaders = FailingNet(), Data(), noisy_loader("shuffled")
    before = {name: one.clone() for name, one in module.state_dict().items()}
    draws = (torch.get_rng_state(), random.getstate(), loaders.dataset.generator.bit_generator.state)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for source in ({"train_dataloaders": loaders}, {"datamodule": data}):
        caplog.clear()
        with pytest.raises(kind):
            Tuner(quiet(default_root_dir=tmp_path, logger=True)).lr_find(module, **source)
    if isinstance(cause, signal.Signals):
        assert caplog.messages[-1].startswith(f"{cause.name}: the trial ends after this step. ")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(draws[0], torch.get_rng_state())
    assert draws[1:] == (random.getstate(), loaders.dataset.generator.bit_generator.state)
    assert not hasattr(data, "dataset")
    assert (module.lr, module.losses) == (0.05, [])
    assert not list(tmp_path.iterdir())


class CountedStream(IterableDataset[Any]):
    position = 7

    def __iter__(self) -> Iterator[Any]:
        for _ in range(24):
            self.position += 1
            yield torch.full((FEATURES,), float(self.position)), torch.ones(1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class LateNet(Net):
    def __init__(self) -> None:
        TrainModule.__init__(self)
        self.lr, self.losses = 0.1, []
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Linear(FEATURES, 1)

    def configure_callbacks(self) -> Any:
        raise AssertionError("the module's callbacks have no part in a trial")


def test_a_stream_keeps_its_position_and_layers_of_configure_model_are_not_built() -> None:  # L-06
    module, stream = LateNet(), CountedStream()
    Tuner(quiet()).lr_find(module, DataLoader(stream, batch_size=4), num_training=8)
    assert stream.position == 7
    assert module.net is None
    assert list(module.parameters()) == []


@pytest.mark.parametrize("profiler", ["simple", "pytorch"])
def test_a_search_whose_steps_log_prints_only_what_it_found(
    monkeypatch: Any, capfd: Any, tmp_path: Path, profiler: str
) -> None:  # L-05, L-06
    class LoggingNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.add_image("batch", batch[0], self.global_step)
            self.loggers[1].run["step"].log(self.global_step)
            self.logger.log_hyperparams({"a": 1})
            self.logger.log_image("batch", batch[0], self.global_step)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(logging.getLogger("drivetrain"), "propagate", False)  # else pytest captures it
    loggers = [CSVLogger(tmp_path), CSVLogger(tmp_path / "second")]
    fit = quiet(profiler=profiler, enable_progress_bar=True, enable_model_summary=True, logger=loggers)
    module = LoggingNet()
    found = Tuner(fit).lr_find(module, loader(), num_training=15, early_stop_threshold=None)
    assert len(found.results["lr"]) == 15
    assert capfd.readouterr() == ("", f"LoggingNet.lr is set to the learning rate {module.lr:.4g}.\n")
    assert not list(tmp_path.iterdir())
    assert fit.profiler.summary() == ""


def test_a_search_that_could_not_be_undone_is_refused() -> None:  # L-06
    with pytest.raises(ConfigurationError, match="yields each batch once"):
        Tuner(quiet()).lr_find(Net(), iter(loader()))
    module: Any = Net()
    module.handle = (each for each in (0,))
    with pytest.raises(ConfigurationError, match="Net cannot be copied"):
        Tuner(quiet()).lr_find(module, loader())


class SavedNet(Net):
    def __init__(self, lr: float = 0.05, width: int = 1) -> None:
        super().__init__(lr)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


@pytest.mark.parametrize("searches", ["tuner", "finder"])
def test_a_run_resumes_although_its_search_finds_another_rate(tmp_path: Path, searches: str) -> None:  # L-06, J-13
    def trained(epochs: int, steps: int, width: int = 1) -> tuple[float, str]:
        search: dict[str, Any] = {"min_lr": 1e-4 * steps, "max_lr": 1e-1}
        finder = [LearningRateFinder(num_training_steps=steps, **search)] if searches == "finder" else []
        fit = quiet(default_root_dir=tmp_path, max_epochs=epochs, enable_checkpointing=True, callbacks=finder)
        module = SavedNet(width=width)
        if searches == "tuner":
            Tuner(fit).lr_find(module, loader(), num_training=steps, **search)
        fit.fit(module, loader(), ckpt_path="auto")
        return module.hparams["lr"], str(fit.log_dir)

    first, second = trained(1, 15), trained(2, 20)
    assert first[0] != second[0]
    assert first[1] == second[1]
    assert trained(2, 20, width=2)[1] != first[1]
