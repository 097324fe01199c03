"""Methods, loaders, callbacks and keys of schedulers are used or named; `test_mistakes` has those refused (I-10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader, recording_callback
from small_modules import tiny
from test_mistakes import data_with, nothing, watch

from captured_warnings import captured_warnings
from drivetrain import ConfigurationError, Fit


def test_methods_whose_names_share_a_word_with_hooks_are_accepted(tmp_path: Path) -> None:  # I-10
    names = ["training_loss", "setup_layers", "step", "log_images", "get_metrics", "on_policy_loss", "on_episode"]
    names += ["test_data", "configure_heads", "predict", "_training_epoch_end", "_validation_steps", "val_step"]
    callback = watch("training_step", "backward", "on_reward", "write")
    with captured_warnings() as lines:
        fit(tmp_path, callbacks=callback).fit(
            tiny(**dict.fromkeys(names, nothing)), datamodule=data_with("train_steps")
        )
    assert not [line for line in lines if "resemble hooks" in line]


def test_a_class_whose_methods_are_almost_named_as_hooks_gets_one_warning(tmp_path: Path) -> None:  # I-10
    names = {
        "configure_optimiser": "configure_optimizers",
        "on_befor_optimizer_step": "on_before_optimizer_step",
        "batch_weights": "batch_weight",
        "training_steps": "training_step",
    }
    module = tiny(**dict.fromkeys(names, nothing))
    with captured_warnings() as lines:
        fit(tmp_path, callbacks=watch("on_validation_ends")).fit(module, datamodule=data_with("prepare_datas"))
    by_class = {line.split()[0]: line for line in lines if "resemble hooks" in line}
    assert len([line for line in lines if "resemble hooks" in line]) == len(by_class) == 3
    for name, hook in names.items():
        assert f"{name} (did you mean {hook}?)" in by_class["Net"]
    assert "on_validation_ends (did you mean on_validation_end?)" in by_class["Watch"]
    assert "prepare_datas (did you mean prepare_data?)" in by_class["Numbers"]


def test_a_method_that_returned_the_loaders_is_accepted(tmp_path: Path) -> None:  # I-10
    module: Any = tiny(valid_dataloader=lambda self: loader(2))
    fit(tmp_path).fit(module, loader(), module.valid_dataloader())
    assert [0, 1] in module.evaluated


@pytest.mark.parametrize(
    ("hook", "loaders"),
    [
        (lambda self, outputs, batch, batch_idx: self.calls.append(batch_idx), loader(4)),
        (lambda self, outputs, batch, batch_idx, dataloader_idx: self.calls.append(dataloader_idx), [loader(2)] * 2),
    ],
)
def test_hooks_may_omit_dataloader_idx_or_require_it(tmp_path: Path, hook: Any, loaders: Any) -> None:  # I-10
    module: Any = tiny(on_validation_batch_end=hook, calls=[])
    fit(tmp_path, num_sanity_val_steps=0).fit(module, loader(), loaders)
    assert module.calls == [0, 1]


def test_setup_may_append_and_remove_callbacks(tmp_path: Path) -> None:  # I-10
    calls: list[str] = []
    appended = recording_callback("appended", calls)

    def setup(self: Any, stage: str) -> None:
        self.trainer.callbacks[:] = [appended]

    fit(tmp_path, callbacks=recording_callback("removed", calls)).fit(tiny(setup=setup), loader())
    assert [call for call in calls if call.startswith("removed")] == ["removed.setup"]
    assert [calls.count(f"appended.{hook}") for hook in ("setup", "on_train_start", "teardown")] == [1, 1, 1]


class Scheduled(Tiny):
    """Logs ``loss`` by epoch, and has a scheduler whose step takes a value."""

    def __init__(self, **keys: Any) -> None:
        super().__init__()
        self.keys, self.values = keys, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 2.0, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)

    def step(self, *values: Any) -> None:
        self.values.extend(values or ["none"])

    def configure_optimizers(self) -> Any:
        return {"optimizer": super().configure_optimizers(), "lr_scheduler": {"scheduler": self, **self.keys}}


@pytest.mark.parametrize(
    ("keys", "values"), [({"monitor": "loss"}, [2.0] * 3), ({"monitor": "los", "strict": False}, [])]
)
def test_a_custom_scheduler_gets_the_value_unless_it_is_missing(tmp_path: Path, keys: Any, values: Any) -> None:  # I-10
    module = Scheduled(reduce_on_plateau=True, **keys)
    with captured_warnings() as lines:
        fit(tmp_path, max_epochs=3).fit(module, loader())
    assert module.values == values
    found = [line for line in lines if "'strict': False" in line]
    assert len(found) == (not values)
    assert all("'los'" in line and "'loss'" in line for line in found)


def test_a_monitor_without_a_scheduler_may_be_switched_off(tmp_path: Path) -> None:  # I-10
    options = {"monitor": "loss", "lr_scheduler": None}
    module = tiny(configure_optimizers=lambda self: {"optimizer": torch.optim.SGD(self.parameters()), **options})
    fit(tmp_path).fit(module, loader())
    assert len(module.seen) == 4


def test_old_names_in_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # I-10
    monkeypatch.setenv("DRIVETRAIN_GPUS", "2")
    with pytest.raises(ConfigurationError, match=r"(?s)DRIVETRAIN_GPUS='2'.*devices="):
        Fit()
    monkeypatch.delenv("DRIVETRAIN_GPUS")
    (tmp_path / "drivetrain.toml").write_text("epochs = 3\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"(?s)sets 'epochs'.*max_epochs="):
        Fit()
