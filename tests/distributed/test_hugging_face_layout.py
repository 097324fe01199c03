"""Checkpoints that `from_pretrained` of Hugging Face's libraries can open, whichever strategy wrote them. Row L-08."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import quiet
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import TrainModule
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging
from drivetrain.checkpoint import convert, load, show
from drivetrain.checkpoint.__main__ import main
from drivetrain.errors import CheckpointError
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

pytest.importorskip("peft")
preload(*DEEPSPEED, "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "peft")

VOCABULARY, LENGTH = 32, 8
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "fsdp": FSDPStrategy,
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}
IDS = torch.arange(LENGTH)[None]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=LENGTH,
                tie_word_embeddings=True,
                eos_token_id=[2, 3],
            )
        )


class Language(TrainModule):
    """Has a Hugging Face model as an attribute, and further state of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.model = llama()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss * self.scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=self.rate)

    rate = 0.0  # for files that do not depend on the order of sums


def _run(strategy: str, world: int, folder: Path, kind: type[Language] = Language, **options: Any) -> None:
    callback = Checkpoint(folder, filename="c", **options)
    settings: Any = {"callbacks": [callback], "enable_checkpointing": True, "default_root_dir": folder, "seed": 1}
    fit = quiet(strategy=STRATEGIES[strategy](), devices=world, **settings)
    tokens = torch.arange(16 * LENGTH).view(16, LENGTH) % VOCABULARY
    fit.fit(kind(), DataLoader(tokens, batch_size=8 // world))  # type: ignore[arg-type]


class Moving(Language):
    rate = 0.05


def _averaged_run(strategy: str, world: int, folder: Path) -> None:
    callbacks = [Checkpoint(folder, filename="c"), EMAWeightAveraging(0.9)]
    settings: Any = {"callbacks": callbacks, "enable_checkpointing": True, "default_root_dir": folder, "seed": 1}
    fit = quiet(strategy=STRATEGIES[strategy](), devices=world, max_epochs=3, **settings)
    tokens = torch.arange(16 * LENGTH).view(16, LENGTH) % VOCABULARY
    fit.fit(Moving(), DataLoader(tokens, batch_size=8 // world))  # type: ignore[arg-type]


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("zero 3", 2)])
def test_the_averages_are_written_if_the_run_evaluated_with_them(strategy: str, world: int, tmp_path: Path) -> None:
    #
    on_ranks(_averaged_run, world, strategy, world, tmp_path, process_group=None)
    checkpoint, name = load(tmp_path / "c"), "model.layers.0.mlp.up_proj.weight"
    average, trained = (weights[f"model.{name}"] for weights in (checkpoint.averages(), checkpoint.weights()))
    assert (average - trained).abs().max() > 0.01
    for flags, wanted in (((), average), (("--averaged",), average), (("--no-averaged",), trained)):
        out = tmp_path / f"out{len(flags)}{flags}"
        assert main(["convert", str(tmp_path / "c"), str(out), "--to", "hf", *flags]) == 0
        assert torch.equal(load_file(out / "model.safetensors")[name], wanted)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def files(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted(folder.iterdir()) if one.is_file()}


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    _run("single", 1, folder)
    return folder / "c"


def test_from_pretrained_opens_it_with_the_same_outputs(
    by_one_process: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # L-08
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # imported by save_pretrained

    assert main(["convert", "--to", "hf", str(by_one_process), str(tmp_path / "out")]) == 0
    assert list(files(tmp_path / "out")) == ["config.json", "generation_config.json", "model.safetensors"]
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    expected = Language.load_from_checkpoint(by_one_process).model
    assert torch.equal(logits(again), logits(expected))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.generation_config.eos_token_id == [2, 3]

    expected.save_pretrained(tmp_path / "theirs")
    ours, theirs = files(tmp_path / "out"), files(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name in ("config.json", "generation_config.json"):
        assert json.loads(ours[name]) == json.loads(theirs[name])
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    )


def test_weights_that_the_configuration_does_not_tie_are_all_stored(tmp_path: Path) -> None:  # L-08
    from transformers import LlamaForCausalLM

    class TiedByHand(Language):
        def __init__(self) -> None:
            super().__init__()
            self.model.config.tie_word_embeddings = False  # and the two weights are still tied

    _run("single", 1, tmp_path / "run", TiedByHand)
    convert(tmp_path / "run" / "c", tmp_path / "out", to="hf")
    again, said = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    assert torch.equal(logits(again), logits(TiedByHand.load_from_checkpoint(tmp_path / "run" / "c").model))


def test_large_checkpoints_are_several_files_with_an_index(by_one_process: Path, tmp_path: Path) -> None:  # L-08
    from transformers import AutoModelForCausalLM

    for out in (tmp_path / "out", "memory://hf/out"):
        convert(by_one_process, out, to="hf", max_shard_size="5KB")
    names = list(files(tmp_path / "out"))
    count = len(names) - 3
    assert count > 2
    assert names[2:] == [
        *(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)),
        "model.safetensors.index.json",
    ]
    assert all(len(content) < 6_000 for content in files(tmp_path / "out").values())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(Language.load_from_checkpoint(by_one_process).model))
    import fsspec

    with fsspec.open("memory://hf/out/model.safetensors.index.json") as file:
        assert file.read() == files(tmp_path / "out")["model.safetensors.index.json"]


@pytest.mark.parametrize("strategy", ["fsdp", "zero 3"])
def test_two_ranks_give_the_same_files(strategy: str, by_one_process: Path, tmp_path: Path) -> None:  # L-08
    on_ranks(_run, 2, strategy, 2, tmp_path / "run", process_group=None, timeout=120)
    convert(tmp_path / "run" / "c", tmp_path / "two", to="hf")
    convert(by_one_process, tmp_path / "one", to="hf")
    assert files(tmp_path / "two") == files(tmp_path / "one")


def test_a_model_with_adapters_is_left_to_its_own_save_pretrained(tmp_path: Path) -> None:  # L-08
    from peft import LoraConfig, PeftModel, get_peft_model

    class Adapted(Language):
        rate = 0.01

        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(7)
                self.model = get_peft_model(self.model, LoraConfig(r=4, target_modules=["q_proj"]))

    _run("single", 1, tmp_path / "run", Adapted, trainable_only=True)
    with pytest.raises(CheckpointError, match=r"(?s)has PEFT adapters.*load_from_checkpoint.*save_pretrained"):
        convert(tmp_path / "run" / "c", tmp_path / "out", to="hf")
    expected = Adapted.load_from_checkpoint(tmp_path / "run" / "c").model
    expected.save_pretrained(tmp_path / "out")
    again = PeftModel.from_pretrained(llama(), tmp_path / "out")
    assert torch.equal(logits(again), logits(expected))


class Plain(Language):
    """Has no Hugging Face model."""

    def __init__(self) -> None:
        TrainModule.__init__(self)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.head = torch.nn.Linear(LENGTH, 1)


def test_unsupported_settings_are_refused_by_name(by_one_process: Path, tmp_path: Path) -> None:  # L-08
    plain = tmp_path / "plain"
    fit = quiet(limit_train_batches=0)
    fit.fit(Plain(), DataLoader(torch.zeros(4, 3)))  # type: ignore[arg-type]
    fit.save_checkpoint(plain)
    for call, said in [
        (lambda out: convert(plain, out, to="hf"), "unclear which Hugging Face model .* has no model configuration"),
        (lambda out: convert(plain, out, to="hf", prefix="head."), "has no configuration of 'head.'"),
        (lambda out: convert(plain, out, to="hf", prefix="tail", config={"model_type": "llama"}), "begin with 'tail.'"),
        (lambda out: convert(by_one_process, out, to="hf", prefix="modle."), "Did you mean 'model'"),
        (lambda out: convert(by_one_process, out, to="hf", config=tmp_path / "none.json"), "cannot be read"),
        (lambda out: convert(by_one_process, out, to="hf", max_shard_size="much"), "not a file size"),
        (lambda out: convert(by_one_process, out, to="hugging face"), "convert.to='hugging face'"),
        (lambda out: convert(by_one_process, "", to="hf"), "does not name a folder"),
        (lambda out: convert(by_one_process, out), "--to hf"),
    ]:
        with pytest.raises(CheckpointError, match=said):
            call(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert(by_one_process, tmp_path / "out", to="hf")
    with pytest.raises(CheckpointError, match=r"already holds 'model.safetensors'"):
        convert(by_one_process, tmp_path / "out", to="hf", max_shard_size=5_000)


def test_a_configuration_can_be_given_separately(by_one_process: Path, tmp_path: Path) -> None:  # L-08
    from transformers import AutoModelForCausalLM

    assert "  models  model (LlamaForCausalLM)\n" in show(by_one_process)
    llama().config.save_pretrained(tmp_path / "theirs")
    convert(by_one_process, tmp_path / "out", to="hf", prefix="model.", config=tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(Language.load_from_checkpoint(by_one_process).model))
