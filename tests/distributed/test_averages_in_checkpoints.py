"""A checkpoint that holds averages is evaluated, loaded and exported with the weights that its run evaluated with."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import STRATEGIES, assert_near, data, loader, quiet
from test_weight_averaging import BATCH, SAMPLES, Net, by_hand
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from drivetrain import Callback, CheckpointError, ConfigurationError, TrainModule
from drivetrain._format.tensor_reader import TensorSource
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from drivetrain.checkpoint import consolidate, load, show
from drivetrain.checkpoint.__main__ import main
from oracle.outcome import whole
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

EPOCHS = 2
CASES = [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero 1", 2), ("zero 3", 2)]


class Noisy(Net):
    """Trained with a large learning rate on random targets, so that its weights differ much from their average."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.norm: nn.Module = nn.BatchNorm1d(4, momentum=0.3) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.3)


def everything() -> DataLoader[Any]:
    return loader(SAMPLES, SAMPLES)


def loss_of(state: dict[str, Tensor]) -> float:
    model = Noisy()
    model.load_state_dict(state)
    with torch.no_grad():
        return float(model.eval().loss(data(SAMPLES).tensors))


def same_loss(found: float, state: dict[str, Tensor]) -> bool:
    return found == pytest.approx(loss_of(state), rel=1e-4)


def ema(**options: Any) -> EMAWeightAveraging:
    return EMAWeightAveraging(0.9, **options)


def fitted(strategy: str, world: int, folder: Path, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
    """Train and return the `Fit` and its module; the checkpoints are in ``folder / "c"``."""
    module = Noisy(settings.pop("normed", False))
    settings["enable_checkpointing"] = any(isinstance(one, Checkpoint) for one in callbacks)
    settings |= {"devices": world, "default_root_dir": folder, "callbacks": list(callbacks)}
    fit = quiet(strategy=STRATEGIES[strategy](), **{"max_epochs": EPOCHS, **settings})
    fit.fit(module, loader(SAMPLES, BATCH // world), everything(), ckpt_path=ckpt_path)
    return fit, module


def kept(folder: Path, **options: Any) -> Checkpoint:
    """Keep the checkpoint of the last epoch only, as the best by the validation's value."""
    return Checkpoint(folder / "c", monitor="epoch", mode="max", **options)


def newest(folder: Path) -> str:
    (path,) = (folder / "c").glob("epoch=*")
    return str(path)


def saved(folder: Path, **options: Any) -> str:
    """Return the checkpoint of a run on one process, which holds both."""
    fitted("single", 1, folder, ema(**options), kept(folder))
    return newest(folder)


def loss_from(path: str, averaged: bool | None = None, fit: Any = None) -> float:
    """Return the loss of a checkpoint's weights in a new module."""
    (values,) = (fit or quiet()).test(Noisy(), everything(), ckpt_path=path, averaged=averaged, verbose=False)
    return values["test"]


def state_of(module: TrainModule) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in module.state_dict().items()}


AVERAGE, TRAINED, _ = by_hand(get_ema_multi_avg_fn(0.9), model=Noisy())
assert abs(loss_of(TRAINED) - loss_of(AVERAGE)) > 0.05  # so that a test can tell them apart


def _tested(strategy: str, world: int, folder: Path) -> dict[str, Any]:
    fit, module = fitted(strategy, world, folder, ema(), kept(folder))
    found: dict[str, Any] = {"validated": module.validated[-1]}
    (values,) = fit.test(dataloaders=everything(), verbose=False)
    found |= {"after fit": values["test"], "module": state_of(module)}
    (values,) = fit.test(dataloaders=everything(), ckpt_path="best", averaged=False, verbose=False)
    found["trained"] = values["test"]
    other, path = quiet(strategy=STRATEGIES[strategy](), devices=world, default_root_dir=folder), newest(folder)
    found["fresh"] = loss_from(path, fit=other)
    (values,) = other.validate(Noisy(), everything(), ckpt_path=path, verbose=False)
    outputs: Any = other.predict(Noisy(), everything(), ckpt_path=path)
    return {**found, "validate": values["val"], "predictions": torch.cat(outputs)}


@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_a_checkpoint_is_evaluated_and_loaded_with_averages(strategy: str, world: int, tmp_path: Path) -> None:
    model = Noisy()
    model.load_state_dict(AVERAGE)
    for found in on_ranks(_tested, world, strategy, world, tmp_path, process_group=None, timeout=120):
        assert same_loss(found["validated"], AVERAGE)
        for entry in ("after fit", "fresh", "validate"):
            assert same_loss(found[entry], AVERAGE), entry
        assert same_loss(found["trained"], TRAINED)
        assert_near(found["module"], AVERAGE, rtol=1e-4)
        torch.testing.assert_close(found["predictions"], model(data(SAMPLES).tensors[0]).detach(), atol=1e-5, rtol=1e-4)
    path = newest(tmp_path)
    checkpoint = load(path)
    assert_near(checkpoint.weights(), TRAINED, rtol=1e-4)
    assert_near(checkpoint.averages(), AVERAGE, rtol=1e-4)
    assert checkpoint.averages().keys() == checkpoint.weights().keys() == AVERAGE.keys()
    stored = AVERAGE.keys() - {"tied.weight", "running_seen"}
    for averaged, wanted in ((None, AVERAGE), (True, AVERAGE), (False, TRAINED)):
        loaded = state_of(Noisy.load_from_checkpoint(path, averaged=averaged))
        assert_near(loaded, wanted, rtol=1e-4)
        file = load_file(consolidate(path, tmp_path / "out", averaged=averaged, overwrite=True))
        assert_near({name: file[name] for name in stored}, {name: wanted[name] for name in stored}, rtol=1e-4)


def _evaluated(strategy: str, world: int, path: str) -> tuple[list[float], Counter[str]]:
    """Return the losses, and how many elements of each weight this rank read, trained and averaged."""
    fit, read, original = quiet(strategy=STRATEGIES[strategy](), devices=world), Counter[str](), TensorSource.read

    def counting(source: TensorSource, region: Any = None) -> Tensor:
        value = original(source, region)
        read[source.entry.name] += value.numel()
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorSource, "read", counting)
        return [loss_from(path, averaged, fit) for averaged in (None, True, False)], read


def _only_fit(strategy: str, world: int, folder: Path, options: dict[str, bool]) -> None:
    fitted(strategy, world, folder, ema(), kept(folder, **options))


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        (("fsdp", 2), ("single", 1), {"trainable_only": True}),
        (("single", 1), ("zero 3", 2), {"save_weights_only": True}),
        (("zero 3", 2), ("ddp", 2), {"save_async": True}),
        (("fsdp", 2), ("fsdp", 2), {"save_weights_only": True, "save_async": True}),
    ],
    ids=str,
)
def test_averages_are_evaluated_under_another_strategy(first: Any, second: Any, options: Any, tmp_path: Path) -> None:
    #
    on_ranks(_only_fit, first[1], *first, tmp_path, options, process_group=None)
    ranks = on_ranks(_evaluated, second[1], *second, newest(tmp_path), process_group=None)
    for found, _ in ranks:
        assert [same_loss(value, AVERAGE) for value in found] == [True, True, False]
        assert same_loss(found[2], TRAINED)
    if second[0] in ("fsdp", "zero 3"):  # in each evaluation, a rank reads its part of one of the two
        for name in ("inner.weight", "head.weight"):
            assert sum(read[name] for _, read in ranks) == 3 * AVERAGE[name].numel()
    assert ("frozen.weight" in load(newest(tmp_path)).averages()) == ("trainable_only" not in options)


def test_weights_that_the_run_did_not_evaluate_with_are_not_chosen(tmp_path: Path) -> None:
    path = saved(tmp_path, evaluate=False)
    assert same_loss(loss_from(path), TRAINED)
    assert same_loss(loss_from(path, averaged=True), AVERAGE)
    assert_near(state_of(Noisy.load_from_checkpoint(path)), TRAINED, rtol=1e-4)


def test_averages_that_are_not_there_cannot_be_chosen(tmp_path: Path) -> None:
    path = saved(tmp_path, update_starting_at_step=100)
    assert load(path).manifest.metadata.averages is None
    assert same_loss(loss_from(path), TRAINED)
    for use in (
        lambda: loss_from(path, averaged=True),
        lambda: Noisy.load_from_checkpoint(path, averaged=True),
        lambda: consolidate(path, tmp_path / "out", averaged=True, overwrite=True),
    ):
        with pytest.raises(CheckpointError, match="holds no averages"):
            use()
    with pytest.raises(ConfigurationError, match="averaged=True"):
        quiet().test(Noisy(), everything(), averaged=True, verbose=False)
    wrong: Any = "ema"
    with pytest.raises(CheckpointError, match="averaged='ema'"):
        quiet().validate(Noisy(), everything(), ckpt_path=path, averaged=wrong, verbose=False)


def test_one_line_says_which_weights_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path)
    for use in (
        lambda averaged: loss_from(path, averaged),
        lambda averaged: Noisy.load_from_checkpoint(path, averaged=averaged),
        lambda averaged: consolidate(path, tmp_path / "out", averaged=averaged, overwrite=True),
    ):
        for averaged, used in ((None, "averages"), (False, "trained weights")):
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="drivetrain"):
                use(averaged)
            (line,) = [text for text in caplog.messages if "averaged=" in text]
            assert path in line
            assert f"the {used} are used" in line
            assert f"averaged={averaged is not None} " in line  # how to choose the others


def test_the_command_line_chooses_the_weights(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    path, out = saved(tmp_path), str(tmp_path / "out.safetensors")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # without pytest's own
    capsys.readouterr()
    for flags, wanted in (([], AVERAGE), (["--averaged"], AVERAGE), (["--no-averaged"], TRAINED)):
        assert main(["consolidate", "--overwrite", path, out, *flags]) == 0
        printed = capsys.readouterr()
        assert f"the {'trained weights' if wanted is TRAINED else 'averages'} are used" in printed.err
        assert printed.out == f"{out}\n"
        torch.testing.assert_close(load_file(out)["head.weight"], wanted["head.weight"], atol=1e-5, rtol=1e-4)
    text = show(path)
    assert "averages of the weights, with which the run evaluated: EMAWeightAveraging" in text
    capsys.readouterr()
    fitted("single", 1, tmp_path / "none", kept(tmp_path / "none"))
    assert main(["consolidate", "--overwrite", newest(tmp_path / "none"), out, "--averaged"]) == 2
    assert "holds no averages" in capsys.readouterr().err


class SavesAverages(Callback):
    """Saves while the module holds the averages: in the last epoch's validation, and at the end."""

    priority = -100

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == EPOCHS - 1:
            trainer.save_checkpoint(self.folder / "validation")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / "end")


class Observer(Callback):
    """Keeps what the module holds as a run starts, after its last step, and at its end."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority  # before or after what replaces the weights
        self.held: dict[str, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.held["start"] = state_of(module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.held["step"] = state_of(module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.held["end"] = state_of(module)


def _saved_while_swapped_in(strategy: str, world: int, folder: Path, evaluate: bool) -> Any:
    fitted(strategy, world, folder, ema(evaluate=evaluate), SavesAverages(folder))
    if strategy.startswith("zero"):
        return {}, {}
    first, resumed, normed = Observer(), Observer(), folder / "normed"
    fitted(strategy, world, folder, ema(), first, SavesAverages(normed), normed=True)
    options: Any = {"normed": True, "max_epochs": EPOCHS + 1, "ckpt_path": normed / "validation"}
    fitted(strategy, world, folder, ema(), resumed, **options)
    return first.held["step"], resumed.held["start"]


@pytest.mark.parametrize(("strategy", "world", "evaluate"), [("single", 1, False), *((*case, True) for case in CASES)])
def test_a_save_under_averages_has_trained_weights(strategy: str, world: int, evaluate: bool, tmp_path: Path) -> None:
    #
    ranks = on_ranks(_saved_while_swapped_in, world, strategy, world, tmp_path, evaluate, process_group=None)
    for name in ("validation", "end"):
        checkpoint = load(tmp_path / name)
        assert_near(checkpoint.weights(), TRAINED, rtol=1e-4)
        assert_near(checkpoint.averages(), AVERAGE, rtol=1e-4)
        record = checkpoint.manifest.metadata.averages
        assert record is not None
        assert record.evaluated == (evaluate or name == "end")
    for trained, resumed in ranks:
        assert_near(resumed, trained)
    if strategy in ("ddp", "fsdp"):
        assert not torch.equal(*(trained["norm.running_mean"] for trained, _ in ranks))


def _swa_saved_and_resumed(strategy: str, world: int, folder: Path) -> Any:
    before, after, resumed = Observer(100), Observer(-100), Observer()
    average = StochasticWeightAveraging(0.3, swa_epoch_start=1)
    fitted(strategy, world, folder, average, before, after, kept(folder), SavesAverages(folder), normed=True)
    average = StochasticWeightAveraging(0.3, swa_epoch_start=1)
    options: Any = {"normed": True, "max_epochs": EPOCHS + 1, "ckpt_path": folder / "end"}
    fitted(strategy, world, folder / "resumed", average, resumed, **options)
    return before.held["end"], after.held["end"], resumed.held["start"], average.updates


@pytest.mark.parametrize(("strategy", "world"), CASES[:3])
def test_a_checkpoint_of_stochastic_averages_resumes_trained(strategy: str, world: int, tmp_path: Path) -> None:
    ranks = on_ranks(_swa_saved_and_resumed, world, strategy, world, tmp_path, process_group=None)
    trained, averaged, *_ = ranks[0]
    checkpoint = load(tmp_path / "end")
    assert not torch.equal(trained["norm.running_var"], averaged["norm.running_var"])
    assert_near(dict(checkpoint.weights()), trained)
    assert_near(dict(checkpoint.averages()), averaged)
    assert_near(state_of(Noisy.load_from_checkpoint(tmp_path / "end")), averaged)
    # The best one was scored with the trained weights, because those of the averages were not ready.
    assert_near(state_of(Noisy.load_from_checkpoint(newest(tmp_path))), trained)
    for own, _, resumed, updates in ranks:
        assert_near(resumed, own)
        assert updates == EPOCHS + 1
    if world > 1:  # each rank has its own statistics
        assert not torch.equal(*(own["norm.running_mean"] for own, *_ in ranks))


class MeanOfEpochs(WeightAveraging):
    """The mean of the weights at the ends of the epochs, as in docs/averaging.md."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


def _mean_of_epochs(strategy: str, world: int, folder: Path) -> Any:
    def leg(**settings: Any) -> Any:
        saver = Checkpoint(folder / "c", save_top_k=-1, monitor="val")
        return fitted(strategy, world, folder, MeanOfEpochs(), saver, **settings)[1]

    first, last = leg(), max((folder / "c").glob("epoch=*"))
    resumed, paths = leg(max_epochs=EPOCHS + 1, ckpt_path=last), sorted((folder / "c").glob("epoch=*"))
    evaluating = quiet(strategy=STRATEGIES[strategy](), devices=world)
    tested = [loss_from(str(path), fit=evaluating) for path in paths]
    return first.validated + resumed.validated, tested, state_of(resumed)


@pytest.mark.parametrize(("strategy", "world"), CASES[:3])
def test_averages_of_epoch_ends_are_saved_as_validated(strategy: str, world: int, tmp_path: Path) -> None:
    ranks = on_ranks(_mean_of_epochs, world, strategy, world, tmp_path, process_group=None)
    trained = [load(path).weights() for path in (tmp_path / "c").glob("epoch=*")]
    means = {name: sum(state[name] for state in trained) / (EPOCHS + 1) for name in dict(Noisy().named_parameters())}
    for validated, tested, module in ranks:
        assert tested == pytest.approx(validated, rel=1e-4)
        assert_near({name: module[name] for name in means}, means, rtol=1e-4)


class Mean(Callback):
    """A third party's average, which uses nothing of drivetrain's own callbacks."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        for name, value in module.named_parameters():
            self.sums[name] = self.sums.get(name, 0) + value.detach()

    @property
    def evaluates_averages(self) -> bool | None:
        return True if self.count else None

    def save_tensors(self, trainer: Any, module: Any) -> dict[str, Tensor]:
        means = {name: total / self.count for name, total in self.sums.items()}
        return {**means, "another tensor": torch.zeros(3)}


def test_averages_of_any_callback_are_used(tmp_path: Path) -> None:
    mean = Mean()
    fitted("single", 1, tmp_path, mean, kept(tmp_path))
    wanted = {name: total / mean.count for name, total in mean.sums.items()}
    loaded = dict(Noisy.load_from_checkpoint(newest(tmp_path)).named_parameters())
    assert_near({name: loaded[name].detach() for name in wanted}, wanted)
    assert "another tensor" not in load(newest(tmp_path)).averages()


def test_a_callback_whose_averages_cannot_be_recorded_is_named(tmp_path: Path) -> None:
    class Misnamed(Mean):
        @property
        def evaluates_averages(self) -> bool | None:
            return True

        def save_tensors(self, trainer: Any, module: Any) -> dict[str, Tensor]:
            return {f"module.{name}": value for name, value in super().save_tensors(trainer, module).items()}

    with pytest.raises(ConfigurationError, match=r"Misnamed.*none of their names"):
        fitted("single", 1, tmp_path, Misnamed(), kept(tmp_path))
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").glob("epoch=*"))


def test_exported_averages_have_the_dtype_of_their_weights(tmp_path: Path) -> None:
    fitted("single", 1, tmp_path, ema(), kept(tmp_path), precision="bf16-true")
    checkpoint = load(newest(tmp_path))
    assert {one.dtype for one in checkpoint.callback_tensors("EMAWeightAveraging").values()} == {torch.float32}
    file = load_file(consolidate(newest(tmp_path), tmp_path / "out", overwrite=True))
    assert {one.dtype for one in file.values()} == {torch.bfloat16}
    for name, average in checkpoint.callback_tensors("EMAWeightAveraging").items():
        assert torch.equal(file[name], average.bfloat16())
