"""A resumed run compares what configure_optimizers gives with what it gave in the saved run (Q-04)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit, TrainModule
from drivetrain.callbacks import BackboneFinetuning
from drivetrain.checkpoint import load

SAVED_AT = 3
Configure = Callable[["Model"], Any]


class Model(TrainModule):
    def __init__(self, configure: Configure, save: Path | None = None, extra_head: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)
        self.extra_head = nn.Linear(3, 1) if extra_head else None
        self.configure, self.save = configure, save
        self.rates: list[list[float]] = []
        """The learning rates of the first optimizer's groups in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.backbone(batch[0])
        loss = self.head(hidden).square().mean()
        return loss if self.extra_head is None else loss + self.extra_head(hidden).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first = self.trainer.optimizers[0]
        if optimizer is first:
            self.rates.append([float(group["lr"]) for group in first.param_groups])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.save is not None and self.trainer.global_step == SAVED_AT:
            self.trainer.save_checkpoint(self.save)

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def adam(**options: Any) -> Configure:
    return lambda module: torch.optim.AdamW(module.parameters(), **{"lr": 0.01, **options})


def grouped(*groups: str, **options: Any) -> Configure:
    """Return a function that builds AdamW with a group for each of ``groups``, the names of layers."""

    def configure(module: Model) -> Any:
        layers = [[getattr(module, name) for name in group.split()] for group in groups]
        params = [{"params": [one for layer in group for one in layer.parameters()]} for group in layers]
        return torch.optim.AdamW(params, **{"lr": 0.01, **options})

    return configure


def scheduled(configure: Configure, scheduler: Callable[[Any], Any]) -> Configure:
    def both(module: Model) -> Any:
        optimizer = configure(module)
        return [optimizer], [{"scheduler": scheduler(optimizer), "interval": "step"}]

    return both


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(48.0).reshape(24, 2) / 48), batch_size=4)


def fit(module: Model, callbacks: Sequence[Callback] = (), folder: Path | None = None, **options: Any) -> Fit:
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    off: dict[str, Any] = dict.fromkeys(names, False)
    off |= {"max_epochs": 2, "seed": 1, "accelerator": "cpu", "callbacks": list(callbacks)}
    if folder is not None:
        off |= {"default_root_dir": folder, "enable_checkpointing": True}
    trainer = Fit(**off)
    trainer.fit(module, data(), **options)
    return trainer


def save(path: Path, configure: Configure) -> Path:
    fit(Model(configure, save=path))
    return path


REFUSED: dict[str, tuple[Configure, Configure, str]] = {
    "amsgrad": (adam(), adam(amsgrad=True), r"amsgrad=False in group 0 of AdamW, and this one amsgrad=True"),
    "maximize": (adam(maximize=True), adam(), r"maximize=True in group 0 of AdamW, and this one maximize=False"),
    "merged groups": (
        grouped("backbone", "head"),
        grouped("backbone head"),
        r"'head\.weight', 'head\.bias' in group 1 of AdamW, and this one in group 0",
    ),
    "split groups": (
        adam(),
        grouped("backbone", "head"),
        r"'head\.weight', 'head\.bias' in group 0 of AdamW, and this one in group 1",
    ),
    "a member less": (
        adam(),
        grouped("head"),
        r"'backbone\.weight', 'backbone\.bias' in group 0 of AdamW, and this one in no group",
    ),
    "a member more": (
        grouped("head"),
        grouped("head backbone"),
        r"'backbone\.weight', 'backbone\.bias' in no group of AdamW, and this one in group 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_groups_members_and_options_are_refused_by_name(case: str, tmp_path: Path) -> None:
    # previously all of these were dropped in silence
    before, now, said = REFUSED[case]
    module = Model(now)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigurationError, match=said) as refused:
        fit(module, ckpt_path=save(tmp_path / "saved", before))
    assert 'fit(..., allow=("optimizer",))' in str(refused.value)
    assert module.rates == []
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("case", REFUSED)
def test_an_allowed_optimizer_starts_anew_although_its_class_is_the_same(case: str, tmp_path: Path) -> None:
    # previously `allow` had no effect, and the groups of the checkpoint were restored
    before, now, _ = REFUSED[case]
    module = Model(now)
    (fresh,) = [now(Model(now))]
    trainer = fit(module, ckpt_path=save(tmp_path / "saved", before), allow=("optimizer",))
    (optimizer,) = trainer.optimizers
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in fresh.param_groups
    ]
    assert optimizer.param_groups[0]["amsgrad"] == fresh.param_groups[0]["amsgrad"]
    step = optimizer.state[module.head.weight]["step"]
    assert (trainer.global_step, int(step)) == (12, 12 - SAVED_AT)


def test_another_learning_rate_is_one_line_and_the_checkpoint_s_value_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    #
    saved = save(tmp_path / "saved", adam())
    module = Model(adam(lr=0.5, betas=(0.8, 0.9), weight_decay=0.01))
    caplog.clear()
    fit(module, ckpt_path=saved)
    assert module.rates == [[0.01]] * (12 - SAVED_AT)
    (line,) = [record.getMessage() for record in caplog.records if "goes on" in record.getMessage()]
    assert "lr=0.01 in group 0 of AdamW, not 0.5" in line
    assert "betas=[0.9, 0.999] in group 0 of AdamW, not [0.8, 0.9]" in line
    assert 'allow=("optimizer",)' in line
    assert "weight_decay" not in line


def test_the_run_s_record_says_that_the_checkpoint_s_learning_rate_goes_on(tmp_path: Path) -> None:
    # previously run.json had only the new value, which did not train
    path = save(tmp_path / "saved", adam())
    trainer = fit(Model(adam(lr=0.5)), folder=tmp_path / "resumed", ckpt_path=path)
    (record,) = (tmp_path / "resumed").rglob("run.json")
    events = json.loads(record.read_text())["events"]
    assert any("lr=0.01 in group 0 of AdamW, not 0.5" in str(event) for event in events)
    assert trainer.global_step == 12


def test_an_allowed_learning_rate_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    #
    module = Model(adam(lr=0.5))
    fit(module, ckpt_path=save(tmp_path / "saved", adam()), allow="optimizer")
    assert module.rates == [[0.5]] * (12 - SAVED_AT)
    assert "goes on" not in caplog.text
    assert "AdamW starts anew" in caplog.text


def test_nothing_starts_anew_if_nothing_differs(tmp_path: Path) -> None:
    # a command that is restarted with `allow` continues its own checkpoints
    module = Model(adam())
    trainer = fit(module, ckpt_path=save(tmp_path / "saved", adam()), allow="optimizer")
    assert int(trainer.optimizers[0].state[module.head.weight]["step"]) == 12


def test_a_chain_of_resumes_compares_with_the_newest_configure_optimizers(tmp_path: Path) -> None:
    # the second run's checkpoint holds the second run's settings
    first, second = save(tmp_path / "first", adam()), tmp_path / "second"

    class Later(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 6:
                self.trainer.save_checkpoint(second)

    Later.__qualname__ = Model.__qualname__
    fit(Later(adam(amsgrad=True)), ckpt_path=first, allow="optimizer")
    module = Model(adam(amsgrad=True))
    trainer = fit(module, ckpt_path=second)
    assert int(trainer.optimizers[0].state[module.head.weight]["step"]) == 12 - SAVED_AT
    with pytest.raises(ConfigurationError, match="amsgrad=True in group 0 of AdamW, and this one amsgrad=False"):
        fit(Model(adam()), ckpt_path=second)


def test_a_rate_that_a_scheduler_or_a_callback_has_changed_is_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # like is compared with like, whatever changed during the saved run
    class Changes(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.25

    def one_cycle(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)

    configure = scheduled(adam(), one_cycle)
    fit(Model(configure, save=tmp_path / "saved"), callbacks=[Changes()])
    trainer = fit(Model(configure), ckpt_path=tmp_path / "saved")
    assert "goes on" not in caplog.text
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize("allow", [(), ("optimizer",)])
def test_a_scheduler_starts_anew_with_its_optimizer(allow: tuple[str, ...], tmp_path: Path) -> None:
    # previously the scheduler of an optimizer that started anew set the learning rates of the checkpoint
    saved = save(tmp_path / "saved", scheduled(adam(), halving))
    module = Model(scheduled(adam(lr=0.16), halving))
    fit(module, ckpt_path=saved, allow=allow)
    first, start = (0.16, 0) if allow else (0.01, SAVED_AT)
    assert module.rates == [[pytest.approx(first * 0.5**step)] for step in range(start, start + 12 - SAVED_AT)]


def two(first: Configure, second: Configure) -> Configure:
    def configure(module: Model) -> Any:
        optimizers = [first(module), second(module)]
        return optimizers, [{"scheduler": halving(one), "interval": "step"} for one in optimizers]

    return configure


def test_of_several_optimizers_only_the_one_that_differs_starts_anew(tmp_path: Path) -> None:
    #
    saved = save(tmp_path / "saved", two(grouped("backbone"), grouped("head")))
    now = two(grouped("backbone"), grouped("head", amsgrad=True))
    with pytest.raises(ConfigurationError, match="amsgrad=False in group 0 of optimizer 1, AdamW, and this one"):
        fit(Model(now), ckpt_path=saved)
    module = Model(now)
    first, second = fit(module, ckpt_path=saved, allow="optimizer").optimizers
    assert int(first.state[module.backbone.weight]["step"]) == 12
    assert int(second.state[module.head.weight]["step"]) == 12 - SAVED_AT
    assert first.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**12)
    assert second.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5 ** (12 - SAVED_AT))


def test_options_that_do_not_change_the_result_are_those_of_this_run(tmp_path: Path) -> None:
    # a checkpoint of a GPU with fused=True resumes on a CPU, with this run's choice
    saved = save(tmp_path / "saved", adam(foreach=True))
    for option in ("foreach", "fused"):
        trainer = fit(Model(adam(**{option: option != "foreach"})), ckpt_path=saved)
        group = trainer.optimizers[0].param_groups[0]
        assert group[option] is (option != "foreach")


def test_a_learning_rate_in_a_tensor_is_compared_by_its_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    #
    saved = save(tmp_path / "saved", adam(lr=torch.tensor(0.25), foreach=False))
    caplog.clear()
    fit(Model(adam(lr=0.25)), ckpt_path=saved)
    assert "goes on" not in caplog.text
    fit(Model(adam(lr=torch.tensor(0.5), foreach=False)), ckpt_path=saved)
    assert "lr=0.25 in group 0 of AdamW, not 0.5" in caplog.text


def only_trainable(module: Model) -> Any:
    return torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=0.01)


class Unfreezing(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.002)


@pytest.mark.parametrize("configure", [grouped("head"), only_trainable], ids=["head", "what trains"])
def test_a_finetuning_resumes_in_mid_schedule(configure: Configure, tmp_path: Path) -> None:
    # Q-04, L-02: the groups that were added go on; configure_optimizers knows nothing of them, or finds the backbone
    # trainable
    class Late(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.save is not None and self.trainer.global_step == 8:
                self.trainer.save_checkpoint(self.save)

    fit(Late(configure, save=tmp_path / "saved"), callbacks=[Unfreezing()])
    module = Late(configure)
    fit(module, callbacks=[Unfreezing()], ckpt_path=tmp_path / "saved")
    assert module.rates == [[0.01, 0.002]] * 4


def test_an_optimizer_that_starts_anew_trains_the_groups_that_were_added(tmp_path: Path) -> None:
    # the callback adds a group once, so a fresh optimizer without it would never train the backbone
    class Late(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.save is not None and self.trainer.global_step == 8:
                self.trainer.save_checkpoint(self.save)

    fit(Late(grouped("head"), save=tmp_path / "saved"), callbacks=[Unfreezing()])
    module = Late(grouped("head", lr=0.04))
    trainer = fit(module, callbacks=[Unfreezing()], ckpt_path=tmp_path / "saved", allow="optimizer")
    assert module.rates == [[0.04, 0.002]] * 4
    (optimizer,) = trainer.optimizers
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    assert len(optimizer.state) == 4


def test_a_new_head_is_in_the_optimizer_or_the_error_says_so(tmp_path: Path) -> None:
    # previously the new head was in no optimizer
    saved = save(tmp_path / "saved", adam())

    def extended() -> Model:
        module = Model(adam(), extra_head=True)
        module.strict_loading = False
        return module

    with pytest.raises(ConfigurationError, match=r"'extra_head\.weight', 'extra_head\.bias' in no group of AdamW"):
        fit(extended(), ckpt_path=saved)
    module = extended()
    assert module.extra_head is not None
    before = module.extra_head.weight.detach().clone()
    (optimizer,) = fit(module, ckpt_path=saved, allow=("optimizer", "module")).optimizers
    assert int(optimizer.state[module.extra_head.weight]["step"]) == 12 - SAVED_AT
    assert not torch.equal(module.extra_head.weight, before)


def without_record(path: Path) -> None:
    """Remove the record of what configure_optimizers gave, as in a checkpoint of an earlier version."""
    rewrite_state(path, lambda state: state["made_of"].pop("optimizer_groups"))


def rewrite_state(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    from drivetrain._distributed.control_plane import LocalControl
    from drivetrain.checkpoint._format import Contents, save

    checkpoint = load(path)
    state = checkpoint.state()
    change(state)
    contents = Contents(
        dict(checkpoint.weights()),
        checkpoint.manifest.metadata,
        optimizers=[checkpoint.optimizer_state(index) for index in range(len(checkpoint.manifest.optimizers))],
        state=state,
        rank_state=checkpoint.rank_state(0),
    )
    checkpoint.close()
    save(str(path), contents, LocalControl())


def test_a_checkpoint_without_the_record_resumes_as_before(tmp_path: Path) -> None:
    # what an old checkpoint does not say is no difference
    saved = save(tmp_path / "saved", adam())
    without_record(saved)
    module = Model(adam(lr=0.5, amsgrad=False))
    trainer = fit(module, ckpt_path=saved)
    assert module.rates == [[0.01]] * (12 - SAVED_AT)
    assert int(trainer.optimizers[0].state[module.head.weight]["step"]) == 12


@pytest.mark.parametrize(
    "malformed",
    [7, [7], [[7]], [[{"params": 7}]], [[{"params": [7]}]], [[{"lr": 0.1}]]],
    ids=str,
)
def test_a_malformed_record_is_a_checkpoint_error(malformed: Any, tmp_path: Path) -> None:
    #
    saved = save(tmp_path / "saved", adam())
    rewrite_state(saved, lambda state: state["made_of"].update(optimizer_groups=malformed))
    with pytest.raises(CheckpointError, match="names no parameters"):
        fit(Model(adam()), ckpt_path=saved)


def test_labels_and_numbers_that_are_equal_are_no_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # a label changes no update; a float32 tensor holds a rate up to its precision; NaN is NaN
    def labelled(label: str, lr: Any) -> Configure:
        return lambda module: torch.optim.AdamW(
            [{"params": list(module.parameters()), "name": label, "unused": float("nan")}], lr=lr, foreach=False
        )

    saved = save(tmp_path / "saved", labelled("all", torch.tensor(0.01)))
    caplog.clear()
    assert fit(Model(labelled("everything", 0.01)), ckpt_path=saved).global_step == 12
    assert "goes on" not in caplog.text


@pytest.mark.parametrize("settings", [[{}, {}], [7]], ids=str)
def test_a_malformed_record_of_schedulers_is_a_checkpoint_error(settings: Any, tmp_path: Path) -> None:
    #
    saved = save(tmp_path / "saved", scheduled(adam(), halving))
    rewrite_state(saved, lambda state: state["made_of"].update(scheduler_settings=settings))
    with pytest.raises(CheckpointError, match="'made_of' in the run's state"):
        fit(Model(scheduled(adam(), halving)), ckpt_path=saved)


def decaying(gamma: float) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)


def test_another_setting_of_a_scheduler_is_said_and_can_be_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # the checkpoint's schedule goes on, unless it is to start anew
    saved = save(tmp_path / "saved", scheduled(adam(lr=1.0), decaying(0.5)))
    caplog.clear()
    module = Model(scheduled(adam(lr=1.0), decaying(0.9)))
    fit(module, ckpt_path=saved)
    assert "gamma=0.5 of StepLR, not 0.9" in caplog.text
    assert 'allow=("scheduler",)' in caplog.text
    assert module.rates == [[0.5**step] for step in range(SAVED_AT, 12)]
    module = Model(scheduled(adam(lr=1.0), decaying(0.9)))
    fit(module, ckpt_path=saved, allow="scheduler")
    ratios = [after[0] / before[0] for before, after in zip(module.rates, module.rates[1:], strict=False)]
    assert ratios == pytest.approx([0.9] * len(ratios))


class RollsBack(Callback):
    """Returns to a checkpoint after the sixth step, once."""

    def __init__(self, path: Path) -> None:
        self.path: str | None = str(path)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6 and self.path is not None:
            path, self.path = self.path, None
            trainer.session.checkpoints.roll_back(path)


def test_a_rollback_to_a_checkpoint_with_another_optimizer_is_refused(tmp_path: Path) -> None:
    # the state of the old optimizer does not belong to the new one
    saved = save(tmp_path / "saved", adam())
    module = Model(lambda one: torch.optim.SGD(one.parameters(), lr=0.125, momentum=0.5))
    with pytest.raises(ConfigurationError, match=r"cannot go back to .*: it had .*AdamW?, and this run SGD"):
        fit(module, callbacks=[RollsBack(saved)], ckpt_path=saved, allow="optimizer")
