"""A resumed run is compared with the saved one, before anything changes: its parts (J-07), and what
configure_optimizers gives (Q-04).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import QUIET
from small_modules import calling
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit, TrainModule
from drivetrain.callbacks import BackboneFinetuning, Checkpoint
from drivetrain.checkpoint import load

SAVED_AT = 3
Configure = Callable[["Model"], Any]


class Model(TrainModule):
    def __init__(self, configure: Configure, save: Path | None = None, save_at: int = SAVED_AT) -> None:
        super().__init__()
        self.backbone, self.heads = nn.Linear(2, 3), nn.ModuleList([nn.Linear(3, 1)])
        self.configure, self.save, self.save_at = configure, save, save_at
        self.seen: list[float] = []
        self.rates: list[list[float]] = []
        """The learning rates of the optimizer's groups in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch[0][:, 0].tolist()
        hidden = self.backbone(batch[0])
        return torch.cat([head(hidden) for head in self.heads]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.save is not None and self.trainer.global_step == self.save_at:
            self.trainer.save_checkpoint(self.save)

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class OtherModel(Model):
    pass


def adam(**options: Any) -> Configure:
    return lambda module: torch.optim.AdamW(module.parameters(), **{"lr": 0.01, **options})


def rmsprop(module: Model) -> Any:
    return torch.optim.RMSprop(module.parameters(), lr=0.01)


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
    return LambdaLR(optimizer, lambda step: 0.5**step)


TOGETHER, APART = grouped("backbone heads"), grouped("backbone", "heads")
MAXIMIZING = adam(maximize=True)
STEPPED = scheduled(adam(), lambda optimizer: StepLR(optimizer, 9))
COSINE = scheduled(adam(), lambda optimizer: CosineAnnealingLR(optimizer, 2))


def data(samples: int = 24, **options: Any) -> DataLoader[Any]:
    dataset = TensorDataset(torch.arange(2.0 * samples).reshape(samples, 2) / 48)
    return DataLoader(dataset, batch_size=4, **(options or {"shuffle": True}))


def fit(module: Model, *callbacks: Callback, batches: Any = None, **options: Any) -> Fit:
    trainer = Fit(max_epochs=2, accelerator="cpu", callbacks=list(callbacks), **QUIET)
    trainer.fit(module, batches or data(), **options)
    return trainer


def save(path: Path, configure: Configure) -> Path:
    fit(Model(configure, save=path))
    return path


def steps_of(trainer: Fit) -> set[int]:
    """How many steps the states of the optimizer's parameters count."""
    return {int(state["step"]) for state in trainer.optimizers[0].state.values()}


def settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{**group, "params": len(group["params"])} for group in optimizer.param_groups]


WEIGHTED = WeightedRandomSampler([1.0] * 24, 24)
HEAD, BACKBONE = r"'heads\.0\.weight', 'heads\.0\.bias'", r"'backbone\.weight', 'backbone\.bias'"
DIFFERENT: list[tuple[str, Configure, Configure, Any, str]] = [
    ("data", adam(), adam(), data(26), "24 training samples, and this one 26"),
    ("data", adam(), adam(), data(shuffle=False), "training data shuffled, and this one in order"),
    ("data", adam(), adam(), data(sampler=WEIGHTED), "shuffled, and this one of WeightedRandomSampler"),
    ("module", adam(), adam(), data(), "Model, and this one .*OtherModel"),
    ("scheduler", STEPPED, COSINE, data(), "StepLR, and this one CosineAnnealingLR"),
    ("optimizer", adam(), rmsprop, data(), "AdamW, and this one RMSprop"),
    ("optimizer", adam(), adam(amsgrad=True), data(), "amsgrad=False in group 0 of AdamW, and this one amsgrad=True"),
    ("optimizer", MAXIMIZING, adam(), data(), "maximize=True in group 0 of AdamW, and this one maximize=False"),
    ("optimizer", APART, TOGETHER, data(), f"{HEAD} in group 1 of AdamW, and this one in group 0"),
    ("optimizer", TOGETHER, grouped("heads"), data(), f"{BACKBONE} in group 0 of AdamW, and this one in no group"),
    ("optimizer", grouped("heads"), TOGETHER, data(), f"{BACKBONE} in no group of AdamW, and this one in group 0"),
]


@pytest.mark.parametrize(("consent", "before", "now", "batches", "difference"), DIFFERENT)
def test_differences_are_refused_by_name_unless_they_are_allowed(
    consent: str, before: Configure, now: Configure, batches: Any, difference: str, tmp_path: Path, caplog: Any
) -> None:  # J-07, Q-04
    saved = save(tmp_path / "saved", before)
    module = OtherModel(now) if consent == "module" else Model(now)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigurationError, match=difference) as refused:
        fit(module, batches=batches, ckpt_path=saved)
    assert f'fit(..., allow=("{consent}",))' in str(refused.value)
    assert module.seen == []
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())

    trainer = fit(module, batches=batches, ckpt_path=saved, allow=(consent,))
    assert "These differences from the resumed run are allowed: " in caplog.text
    assert trainer.current_epoch == 2
    if consent == "data":  # the current epoch restarts
        assert trainer.global_step == SAVED_AT + 2 * len(batches)
        assert len(module.seen) == 2 * len(batches.dataset)
    else:
        rest_of_epoch = 24 - 4 * SAVED_AT
        assert (trainer.global_step, len(module.seen)) == (12, rest_of_epoch + 24)
        assert len(set(module.seen[:rest_of_epoch])) == rest_of_epoch
    if consent == "optimizer":  # it starts anew, with the settings of this run
        assert settings(trainer.optimizers[0]) == settings(now(module))
        assert steps_of(trainer) == {12 - SAVED_AT}


def test_an_unknown_name_in_allow_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"allow='optimiser'\) is unknown. Did you mean 'optimizer'"):
        fit(Model(adam()), allow=("optimiser",))


def decaying(gamma: float) -> Configure:
    return scheduled(adam(lr=1.0), lambda optimizer: StepLR(optimizer, 1, gamma))


HALVING, HALVING_NOW = scheduled(adam(), halving), scheduled(adam(lr=0.16), halving)
LR = "lr=0.01 in group 0 of AdamW, not"
BETAS = "betas=[0.9, 0.999] in group 0 of AdamW, not [0.8, 0.9]"
GAMMA = "gamma=0.5 of StepLR, not 0.9"
OPTIMIZER, SCHEDULER = 'allow=("optimizer",)', 'allow=("scheduler",)'


@pytest.mark.parametrize(
    ("before", "now", "allow", "logged", "rates"),
    [
        (adam(), adam(lr=0.5, betas=(0.8, 0.9), weight_decay=0.01), "", [f"{LR} 0.5", BETAS, OPTIMIZER], [0.01] * 9),
        (decaying(0.5), decaying(0.9), "", [GAMMA, SCHEDULER], [0.5**step for step in range(3, 12)]),
        (decaying(0.5), decaying(0.9), "scheduler", [], [0.125 * 0.9**step for step in range(9)]),
        (HALVING, HALVING_NOW, "", [f"{LR} 0.16"], [0.01 * 0.5**step for step in range(3, 12)]),
        (HALVING, HALVING_NOW, "optimizer", [], [0.16 * 0.5**step for step in range(9)]),
    ],
)
def test_another_number_is_logged_and_the_checkpoint_s_goes_on_unless_the_part_starts_anew(
    before: Configure,
    now: Configure,
    allow: str,
    logged: list[str],
    rates: list[float],
    tmp_path: Path,
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved, module = save(tmp_path / "saved", before), Model(now)
    caplog.clear()
    fit(module, Checkpoint(), ckpt_path=saved, allow=(allow,) if allow else ())
    assert module.rates == [[pytest.approx(rate)] for rate in rates]
    lines = [record.getMessage() for record in caplog.records if "goes on" in record.getMessage()]
    assert len(lines) == bool(logged)
    for part in logged:
        assert part in lines[0]
        assert "weight_decay" not in lines[0]
    (record,) = tmp_path.rglob("run.json")
    events = json.loads(record.read_text())["events"]
    kept = [event["text"] for event in events if event["kind"] == "kept settings"]
    assert kept == [line.partition(" To start with")[0] for line in lines]


def labelled(label: str) -> Configure:
    return lambda module: torch.optim.AdamW(
        [{"params": list(module.parameters()), "name": label, "unused": float("nan")}], lr=0.01, foreach=False
    )


@pytest.mark.parametrize(
    ("before", "now", "allow"),
    [
        pytest.param(adam(), adam(), "optimizer", id="allowed, but equal"),
        pytest.param(labelled("all"), labelled("everything"), (), id="a label"),
        pytest.param(adam(lr=torch.tensor(0.01), foreach=False), adam(), (), id="a rate in a tensor"),
        pytest.param(adam(foreach=True), adam(foreach=False), (), id="foreach"),
        pytest.param(adam(foreach=True), adam(fused=True), (), id="fused"),
    ],
)
def test_what_changes_no_update_is_allowed(before: Any, now: Any, allow: Any, tmp_path: Path, caplog: Any) -> None:
    # this run's choice of foreach and fused applies
    saved, module = save(tmp_path / "saved", before), Model(now)
    caplog.clear()
    trainer = fit(module, ckpt_path=saved, allow=allow)
    assert steps_of(trainer) == {12}
    assert "goes on" not in caplog.text
    assert "starts anew" not in caplog.text
    found, fresh = trainer.optimizers[0].param_groups[0], now(module).param_groups[0]
    assert (found["foreach"], found["fused"]) == (fresh["foreach"], fresh["fused"])


def test_a_setting_that_a_scheduler_or_a_callback_changed_is_no_difference(tmp_path: Path, caplog: Any) -> None:
    def decay(trainer: Any) -> None:
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.25

    configure = scheduled(adam(), lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=12))
    fit(Model(configure, save=tmp_path / "saved"), calling("on_train_batch_end", decay))
    trainer = fit(Model(configure), ckpt_path=tmp_path / "saved")
    assert "goes on" not in caplog.text
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.25


def test_a_chain_of_resumes_compares_with_the_newest_configure_optimizers(tmp_path: Path) -> None:
    # the second run's checkpoint holds the second run's settings
    first, second = save(tmp_path / "first", adam()), tmp_path / "second"
    fit(Model(adam(amsgrad=True), save=second, save_at=6), ckpt_path=first, allow="optimizer")
    assert steps_of(fit(Model(adam(amsgrad=True)), ckpt_path=second)) == {12 - SAVED_AT}
    with pytest.raises(ConfigurationError, match="amsgrad=True in group 0 of AdamW, and this one amsgrad=False"):
        fit(Model(adam()), ckpt_path=second)


def only_trainable(module: Model) -> Any:
    return torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=0.01)


@pytest.mark.parametrize(
    ("before", "now", "allow", "rate"),
    [
        # configure_optimizers knows nothing of the groups that were added, or finds the backbone trainable
        pytest.param(grouped("heads"), grouped("heads"), (), 0.01, id="head"),
        pytest.param(only_trainable, only_trainable, (), 0.01, id="what trains"),
        # the callback adds its group once: an optimizer that starts anew needs it to train the backbone
        pytest.param(grouped("heads"), grouped("heads", lr=0.04), "optimizer", 0.04, id="anew"),
    ],
)
def test_a_finetuning_resumes_in_mid_schedule(before: Any, now: Any, allow: Any, rate: float, tmp_path: Path) -> None:
    # Q-04, L-02
    def unfreezing() -> Callback:
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.002)

    fit(Model(before, save=tmp_path / "saved", save_at=8), unfreezing())
    module = Model(now)
    trainer = fit(module, unfreezing(), ckpt_path=tmp_path / "saved", allow=allow)
    assert module.rates == [[rate, 0.002]] * 4
    assert steps_of(trainer) == ({4} if allow else {6, 12})


def test_a_new_head_is_in_the_optimizer_or_the_error_says_so(tmp_path: Path) -> None:
    saved, module, head = save(tmp_path / "saved", adam()), Model(adam()), nn.Linear(3, 1)
    module.heads.append(head)
    module.strict_loading = False
    before = head.weight.detach().clone()
    with pytest.raises(ConfigurationError, match=r"'heads\.1\.weight', 'heads\.1\.bias' in no group of AdamW"):
        fit(module, ckpt_path=saved)
    trainer = fit(module, ckpt_path=saved, allow=("optimizer", "module"))
    assert steps_of(trainer) == {12 - SAVED_AT}
    assert not torch.equal(head.weight, before)


def rewrite_state(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    # Private: there is no public way to write a malformed checkpoint.
    from drivetrain._distributed.control_plane import LocalControl
    from drivetrain._format import StateToSave, save

    checkpoint = load(path)
    state, ranks, optimizers = checkpoint.state(), checkpoint.rank_state(0), [checkpoint.optimizer_state()]
    change(state["components"])
    weights, metadata = dict(checkpoint.weights()), checkpoint.manifest.metadata
    contents = StateToSave(weights, metadata, optimizers=optimizers, state=state, rank_state=ranks)
    checkpoint.close()
    save(str(path), contents, LocalControl())


@pytest.mark.parametrize(
    ("name", "malformed", "error"),
    [
        ("optimizer_groups", 7, "'components or trainables' cannot be restored"),
        ("optimizer_groups", [[{"params": [7]}]], "'components or trainables' cannot be restored"),
        ("optimizer_groups", [[{"lr": 0.1}]], "'components or trainables' cannot be restored"),
        ("scheduler_settings", [{}, {}], "'components' cannot be restored"),
        ("scheduler_settings", [7], "'components' cannot be restored"),
    ],
)
def test_a_malformed_record_is_a_checkpoint_error(name: str, malformed: Any, error: str, tmp_path: Path) -> None:
    #
    saved = save(tmp_path / "saved", scheduled(adam(), halving))
    rewrite_state(saved, lambda components: components.update({name: malformed}))
    with pytest.raises(CheckpointError, match=error):
        fit(Model(scheduled(adam(), halving)), ckpt_path=saved)


def test_a_rollback_to_a_checkpoint_with_another_optimizer_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", adam())
    going_back = calling("on_train_batch_end", lambda trainer: trainer.roll_back(str(saved)))
    with pytest.raises(ConfigurationError, match=r"cannot go back to .*: it had .*AdamW?, and this run RMSprop"):
        fit(Model(rmsprop), going_back, ckpt_path=saved, allow="optimizer")
