"""Arguments of weight averaging, and which buffers are averaged; averages of weights: tests/distributed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import EMAWeightAveraging, WeightAveraging
from drivetrain.errors import ConfigurationError


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(module: Net, callbacks: list[Callback], **settings: Any) -> Net:
    fit = Fit(accelerator="cpu", barebones=True, max_epochs=2, callbacks=callbacks, **settings)
    fit.fit(module, DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4))
    return module


@pytest.mark.parametrize(
    "options",
    [
        {"decay": 1.5},
        {"decay": -0.1},
        {"decay": float("nan")},
        {"update_every_n_steps": 0},
        {"update_every_n_steps": 1.5},
        {"update_starting_at_step": -1},
        {"update_starting_at_epoch": "2"},
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_by_name(options: dict[str, Any]) -> None:  # L-01
    (name,) = options
    with pytest.raises(ConfigurationError, match=rf"EMAWeightAveraging\({name}="):
        EMAWeightAveraging(**options)


def test_what_is_no_function_is_refused() -> None:  # L-01
    with pytest.raises(ConfigurationError, match=r"WeightAveraging\(avg_fn=0.9\)"):
        WeightAveraging(0.9)  # type: ignore[arg-type]


def test_two_averages_of_one_module_are_refused() -> (
    None
):  # L-01: each would treat the other's average as trained weights
    with pytest.raises(ConfigurationError, match="EMAWeightAveraging and WeightAveraging in one run"):
        fitted(Net(), [EMAWeightAveraging(), WeightAveraging()])


def test_nothing_of_a_run_stays_in_it() -> None:
    averaging = EMAWeightAveraging(0.5)
    fitted(Net(), [averaging])
    assert averaging.updates == 4
    copy.deepcopy(averaging)
    assert pickle.loads(pickle.dumps(averaging)).updates == 4
    fitted(Net(), [averaging])
    assert averaging.updates == 4  # of the second run


def test_a_subclass_says_when() -> None:  # L-01
    asked: list[tuple[int | None, int | None]] = []

    class AtEnds(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            asked.append((step_idx, epoch_idx))
            return epoch_idx is not None

    after: list[torch.Tensor] = []

    class Ends(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            after.append(module.net.weight.detach().clone())

    module = fitted(Net(), [AtEnds(), Ends()])
    assert asked == [(0, None), (1, None), (None, 0), (2, None), (3, None), (None, 1)]
    torch.testing.assert_close(module.net.weight.detach(), (after[0] + after[1]) / 2)


class Normed(TrainModule):
    """A network with spectral norms, whose power iteration keeps unit vectors in buffers, and with a batch norm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(norm(torch.nn.Linear(4, 4)), torch.nn.BatchNorm1d(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_only_running_statistics_among_buffers_are_averaged(tmp_path: Path, norm: Any) -> None:
    # S-14
    found = []
    data = DataLoader(TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0))), 4)
    for callbacks in ([], [EMAWeightAveraging(0.5)]):
        module = Normed(norm)
        off: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        Fit(max_epochs=1, callbacks=list(callbacks), accelerator="cpu", default_root_dir=tmp_path, **off).fit(
            module, data
        )
        found.append(dict(module.named_buffers()))
    trained, averaged = found
    for name in trained:
        is_averaged = not torch.equal(trained[name], averaged[name])
        assert is_averaged == name.rpartition(".")[2].startswith("running_"), name
    vectors = [value for name, value in averaged.items() if value.ndim == 1 and "running_" not in name]
    assert vectors
    for vector in vectors:
        torch.testing.assert_close(vector.norm(), torch.ones(()))
