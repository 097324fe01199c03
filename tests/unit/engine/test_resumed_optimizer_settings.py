"""A resumed run compares what configure_optimizers gives with what it gave in the saved run (Q-04)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_modules import calling
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit, TrainModule
from drivetrain.callbacks import BackboneFinetuning
from drivetrain.checkpoint import load

SAVED_AT = 3
Configure = Callable[["Model"], Any]


class Model(TrainModule):
    def __init__(
        self, configure: Configure, save: Path | None = None, save_at: int = SAVED_AT, extra_head: bool = False
    ) -> None:
        super().__init__()
        self.backbone = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)
        self.extra_head = nn.Linear(3, 1) if extra_head else None
        self.configure, self.save, self.save_at = configure, save, save_at
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
        if self.save is not None and self.trainer.global_step == self.save_at:
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


def fit(module: Model, *callbacks: Callback, **options: Any) -> Fit:
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    off: dict[str, Any] = dict.fromkeys(names, False)
    trainer = Fit(max_epochs=2, seed=1, accelerator="cpu", callbacks=list(callbacks), **off)
    trainer.fit(module, data(), **options)
    return trainer


def save(path: Path, configure: Configure) -> Path:
    fit(Model(configure, save=path))
    return path


def steps_of(trainer: Fit, parameter: torch.Tensor) -> int:
    """How many steps the state of a parameter counts."""
    return int(trainer.optimizers[0].state[parameter]["step"])


REFUSED = [
    pytest.param(adam(), adam(amsgrad=True), "amsgrad=False in group 0 of AdamW, and this one amsgrad=True", id="on"),
    pytest.param(
        adam(maximize=True), adam(), "maximize=True in group 0 of AdamW, and this one maximize=False", id="off"
    ),
    pytest.param(
        grouped("backbone", "head"),
        grouped("backbone head"),
        r"'head\.weight', 'head\.bias' in group 1 of AdamW, and this one in group 0",
        id="merged groups",
    ),
    pytest.param(
        adam(),
        grouped("head"),
        r"'backbone\.weight', 'backbone\.bias' in group 0 of AdamW, and this one in no group",
        id="a member less",
    ),
    pytest.param(
        grouped("head"),
        grouped("head backbone"),
        r"'backbone\.weight', 'backbone\.bias' in no group of AdamW, and this one in group 0",
        id="a member more",
    ),
]


@pytest.mark.parametrize(("before", "now", "difference"), REFUSED)
def test_other_groups_members_and_options_are_refused_by_name_or_start_anew(
    before: Configure, now: Configure, difference: str, tmp_path: Path
) -> None:
    #
    saved, module = save(tmp_path / "saved", before), Model(now)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigurationError, match=difference) as refused:
        fit(module, ckpt_path=saved)
    assert 'fit(..., allow=("optimizer",))' in str(refused.value)
    assert module.rates == []
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    fresh = now(Model(now)).param_groups
    trainer = fit(module, ckpt_path=saved, allow=("optimizer",))
    groups = trainer.optimizers[0].param_groups
    assert [len(group["params"]) for group in groups] == [len(group["params"]) for group in fresh]
    assert groups[0]["amsgrad"] == fresh[0]["amsgrad"]
    assert (trainer.global_step, steps_of(trainer, module.head.weight)) == (12, 12 - SAVED_AT)


def test_another_learning_rate_is_logged_and_the_checkpoint_s_value_goes_on(
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


def labelled(label: str, lr: Any) -> Configure:
    return lambda module: torch.optim.AdamW(
        [{"params": list(module.parameters()), "name": label, "unused": float("nan")}], lr=lr, foreach=False
    )


@pytest.mark.parametrize(
    ("before", "now", "allow"),
    [
        pytest.param(adam(), adam(), "optimizer", id="allowed, but equal"),
        pytest.param(labelled("all", 0.01), labelled("everything", 0.01), (), id="a label"),
        pytest.param(adam(lr=torch.tensor(0.01), foreach=False), adam(), (), id="a rate in a tensor"),
        pytest.param(adam(foreach=True), adam(foreach=False), (), id="foreach"),
        pytest.param(adam(foreach=True), adam(fused=True), (), id="fused"),
    ],
)
def test_what_changes_no_update_is_no_difference(
    before: Configure, now: Configure, allow: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # this run's choice of foreach and fused applies
    saved, module = save(tmp_path / "saved", before), Model(now)
    caplog.clear()
    trainer = fit(module, ckpt_path=saved, allow=allow)
    assert steps_of(trainer, module.head.weight) == 12
    assert "goes on" not in caplog.text
    assert "starts anew" not in caplog.text
    found, fresh = trainer.optimizers[0].param_groups[0], now(module).param_groups[0]
    assert (found["foreach"], found["fused"]) == (fresh["foreach"], fresh["fused"])


def test_a_chain_of_resumes_compares_with_the_newest_configure_optimizers(tmp_path: Path) -> None:
    # the second run's checkpoint holds the second run's settings
    first, second = save(tmp_path / "first", adam()), tmp_path / "second"
    fit(Model(adam(amsgrad=True), save=second, save_at=6), ckpt_path=first, allow="optimizer")
    module = Model(adam(amsgrad=True))
    trainer = fit(module, ckpt_path=second)
    assert steps_of(trainer, module.head.weight) == 12 - SAVED_AT
    with pytest.raises(ConfigurationError, match="amsgrad=True in group 0 of AdamW, and this one amsgrad=False"):
        fit(Model(adam()), ckpt_path=second)


def test_a_rate_that_a_scheduler_or_a_callback_has_changed_is_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # like is compared with like, whatever changed during the saved run
    def decay(trainer: Any) -> None:
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.25

    configure = scheduled(adam(), lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=12))
    fit(Model(configure, save=tmp_path / "saved"), calling("on_train_batch_end", decay))
    trainer = fit(Model(configure), ckpt_path=tmp_path / "saved")
    assert "goes on" not in caplog.text
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize("allow", [(), ("optimizer",)])
def test_a_scheduler_starts_anew_with_its_optimizer(allow: tuple[str, ...], tmp_path: Path) -> None:
    #
    saved = save(tmp_path / "saved", scheduled(adam(), halving))
    module = Model(scheduled(adam(lr=0.16), halving))
    fit(module, ckpt_path=saved, allow=allow)
    first, start = (0.16, 0) if allow else (0.01, SAVED_AT)
    assert module.rates == [[pytest.approx(first * 0.5**step)] for step in range(start, start + 12 - SAVED_AT)]


def only_trainable(module: Model) -> Any:
    return torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=0.01)


class Unfreezing(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.002)


@pytest.mark.parametrize("configure", [grouped("head"), only_trainable], ids=["head", "what trains"])
def test_a_finetuning_resumes_in_mid_schedule(configure: Configure, tmp_path: Path) -> None:
    # Q-04, L-02: configure_optimizers knows nothing of the groups that were added, or finds the backbone trainable
    fit(Model(configure, save=tmp_path / "saved", save_at=8), Unfreezing())
    module = Model(configure)
    fit(module, Unfreezing(), ckpt_path=tmp_path / "saved")
    assert module.rates == [[0.01, 0.002]] * 4


def test_an_optimizer_that_starts_anew_trains_the_groups_that_were_added(tmp_path: Path) -> None:
    # the callback adds a group once, so a fresh optimizer without it would never train the backbone
    fit(Model(grouped("head"), save=tmp_path / "saved", save_at=8), Unfreezing())
    module = Model(grouped("head", lr=0.04))
    trainer = fit(module, Unfreezing(), ckpt_path=tmp_path / "saved", allow="optimizer")
    assert module.rates == [[0.04, 0.002]] * 4
    assert [int(state["step"]) for state in trainer.optimizers[0].state.values()] == [4] * 4


def test_a_new_head_is_in_the_optimizer_or_the_error_says_so(tmp_path: Path) -> None:
    #
    saved = save(tmp_path / "saved", adam())
    module = Model(adam(), extra_head=True)
    module.strict_loading = False
    assert module.extra_head is not None
    with pytest.raises(ConfigurationError, match=r"'extra_head\.weight', 'extra_head\.bias' in no group of AdamW"):
        fit(module, ckpt_path=saved)
    before = module.extra_head.weight.detach().clone()
    trainer = fit(module, ckpt_path=saved, allow=("optimizer", "module"))
    assert steps_of(trainer, module.extra_head.weight) == 12 - SAVED_AT
    assert not torch.equal(module.extra_head.weight, before)


def rewrite_state(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    # Private: there is no public way to write a checkpoint of an earlier version, or a malformed one.
    from drivetrain._distributed.control_plane import LocalControl
    from drivetrain.checkpoint._format import Contents, save

    checkpoint = load(path)
    state = checkpoint.state()
    change(state["made_of"])
    contents = Contents(
        dict(checkpoint.weights()),
        checkpoint.manifest.metadata,
        optimizers=[checkpoint.optimizer_state(index) for index in range(len(checkpoint.manifest.optimizers))],
        state=state,
        rank_state=checkpoint.rank_state(0),
    )
    checkpoint.close()
    save(str(path), contents, LocalControl())


def test_a_checkpoint_of_a_version_that_did_not_record_options_resumes(tmp_path: Path) -> None:
    # what an old checkpoint does not say is no difference
    saved = save(tmp_path / "saved", adam())
    rewrite_state(saved, lambda made_of: made_of.pop("optimizer_groups"))
    module = Model(adam(lr=0.5, amsgrad=False))
    trainer = fit(module, ckpt_path=saved)
    assert module.rates == [[0.01]] * (12 - SAVED_AT)
    assert steps_of(trainer, module.head.weight) == 12


@pytest.mark.parametrize(
    ("name", "malformed", "error"),
    [
        ("optimizer_groups", 7, "names no parameters"),
        ("optimizer_groups", [[{"params": [7]}]], "names no parameters"),
        ("optimizer_groups", [[{"lr": 0.1}]], "names no parameters"),
        ("scheduler_settings", [{}, {}], "'made_of' in the run's state"),
        ("scheduler_settings", [7], "'made_of' in the run's state"),
    ],
)
def test_a_malformed_record_is_a_checkpoint_error(name: str, malformed: Any, error: str, tmp_path: Path) -> None:
    #
    saved = save(tmp_path / "saved", scheduled(adam(), halving))
    rewrite_state(saved, lambda made_of: made_of.update({name: malformed}))
    with pytest.raises(CheckpointError, match=error):
        fit(Model(scheduled(adam(), halving)), ckpt_path=saved)


def test_another_setting_of_a_scheduler_is_logged_and_can_be_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # the checkpoint's schedule goes on, unless it is to start anew
    def decaying(gamma: float) -> Configure:
        return scheduled(adam(lr=1.0), lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma))

    saved, module = save(tmp_path / "saved", decaying(0.5)), Model(decaying(0.9))
    caplog.clear()
    fit(module, ckpt_path=saved)
    assert "gamma=0.5 of StepLR, not 0.9" in caplog.text
    assert 'allow=("scheduler",)' in caplog.text
    assert module.rates == [[0.5**step] for step in range(SAVED_AT, 12)]
    module = Model(decaying(0.9))
    fit(module, ckpt_path=saved, allow="scheduler")
    ratios = [after[0] / before[0] for before, after in zip(module.rates, module.rates[1:], strict=False)]
    assert ratios == pytest.approx([0.9] * len(ratios))


def test_a_rollback_to_a_checkpoint_with_another_optimizer_is_refused(tmp_path: Path) -> None:
    # the state of the old optimizer does not belong to the new one
    saved = save(tmp_path / "saved", adam())
    module = Model(lambda one: torch.optim.SGD(one.parameters(), lr=0.125, momentum=0.5))
    going_back = calling("on_train_batch_end", lambda trainer: trainer.roll_back(str(saved)))
    with pytest.raises(ConfigurationError, match=r"cannot go back to .*: it had .*AdamW?, and this run SGD"):
        fit(module, going_back, ckpt_path=saved, allow="optimizer")
