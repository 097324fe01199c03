"""Checkpoints of models and PEFT adapters of Hugging Face, whichever strategy wrote them. Row L-08."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import STRATEGIES, Regression, assert_near, failing, loader, quiet, seeded, train_by_hand
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import TrainModule
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging
from drivetrain.checkpoint import convert, load, show
from drivetrain.checkpoint.__main__ import main
from drivetrain.errors import CheckpointError
from drivetrain.testing import requires_package
from worlds import DEEPSPEED, on_ranks, preload

pytestmark = requires_package("peft")
preload(*DEEPSPEED, "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "peft")

VOCABULARY, LENGTH = 32, 8


def llama(seed: int = 0, tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "eos_token_id": [2, 3]}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options))


class Language(TrainModule):
    rate = 0.0  # for files that do not depend on the order of sums

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.model = llama()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss * self.scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=self.rate)


class Adapted(Language):
    rate = 0.01

    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        self.model = seeded(lambda: get_peft_model(self.model, LoraConfig(r=4, target_modules=["q_proj"])))


def train(strategy: str, world: int, folder: Path, kind: type[Language] = Language, average: bool = False) -> None:
    """Train, and write the checkpoint "c"."""
    saver = Checkpoint(folder, filename="c", trainable_only=kind is Adapted)
    callbacks = [saver, EMAWeightAveraging(0.9)] if average else [saver]
    settings: Any = {"callbacks": callbacks, "enable_checkpointing": True, "default_root_dir": folder, "seed": 1}
    fit = quiet(strategy=STRATEGIES[strategy](), devices=world, max_epochs=3 if average else 1, **settings)
    tokens: Any = torch.arange(16 * LENGTH).view(16, LENGTH) % VOCABULARY
    module = kind()
    module.rate = 0.05 if average else kind.rate
    fit.fit(module, DataLoader(tokens, batch_size=8 // world))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(LENGTH)[None]).logits


def assert_opens(out: Path, checkpoint: Path, kind: type[Language] = Language) -> Any:
    """Assert that `from_pretrained` opens the folder with the checkpoint's outputs; return the model."""
    from transformers import AutoModelForCausalLM

    again, unmatched = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(unmatched.values())
    assert torch.equal(logits(again), logits(kind.load_from_checkpoint(checkpoint).model))
    return again


def files(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted(folder.iterdir()) if one.is_file()}


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    train("single", 1, folder)
    return folder / "c"


def test_the_averages_are_written_if_the_run_evaluated_with_them(tmp_path: Path) -> None:
    on_ranks(train, 2, "zero 3", 2, tmp_path, Language, True, process_group=None)
    checkpoint, name = load(tmp_path / "c"), "model.layers.0.mlp.up_proj.weight"
    average, trained = (weights[f"model.{name}"] for weights in (checkpoint.averages(), checkpoint.weights()))
    assert (average - trained).abs().max() > 0.01
    for flags, wanted in (((), average), (("--averaged",), average), (("--no-averaged",), trained)):
        out = tmp_path / f"out{len(flags)}{flags}"
        assert main(["convert", str(tmp_path / "c"), str(out), "--to", "hf", *flags]) == 0
        assert torch.equal(load_file(out / "model.safetensors")[name], wanted)


def test_from_pretrained_opens_it_with_the_same_outputs(by_one_process: Path, tmp_path: Path, monkeypatch: Any) -> None:
    # L-08
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # imported by save_pretrained
    assert main(["convert", "--to", "hf", str(by_one_process), str(tmp_path / "out")]) == 0
    again = assert_opens(tmp_path / "out", by_one_process)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.generation_config.eos_token_id == [2, 3]
    again.save_pretrained(tmp_path / "theirs")
    ours, theirs = files(tmp_path / "out"), files(tmp_path / "theirs")
    assert list(ours) == list(theirs) == ["config.json", "generation_config.json", "model.safetensors"]
    for name in ("config.json", "generation_config.json"):
        assert json.loads(ours[name]) == json.loads(theirs[name])
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "theirs")]
    assert weights[0].keys() == weights[1].keys()


class TiedByHand(Language):
    def __init__(self) -> None:
        super().__init__()
        self.model.config.tie_word_embeddings = False  # and the two weights are still tied


def test_weights_that_the_configuration_does_not_tie_are_all_stored(tmp_path: Path) -> None:  # L-08
    train("single", 1, tmp_path / "run", TiedByHand)
    convert(tmp_path / "run" / "c", tmp_path / "out", to="hf")
    assert_opens(tmp_path / "out", tmp_path / "run" / "c", TiedByHand)


@pytest.mark.parametrize("strategy", ["fsdp", "zero 3"])
def test_two_ranks_give_the_same_files(strategy: str, by_one_process: Path, tmp_path: Path) -> None:  # L-08
    on_ranks(train, 2, strategy, 2, tmp_path / "run", process_group=None, timeout=120)
    convert(tmp_path / "run" / "c", tmp_path / "two", to="hf")
    convert(by_one_process, tmp_path / "one", to="hf")
    assert files(tmp_path / "two") == files(tmp_path / "one")


def test_a_model_with_adapters_is_left_to_its_own_save_pretrained(tmp_path: Path) -> None:  # L-08
    from peft import PeftModel

    train("single", 1, tmp_path / "run", Adapted)
    with pytest.raises(CheckpointError, match=r"(?s)has PEFT adapters.*load_from_checkpoint.*save_pretrained"):
        convert(tmp_path / "run" / "c", tmp_path / "out", to="hf")
    expected = Adapted.load_from_checkpoint(tmp_path / "run" / "c").model
    expected.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(PeftModel.from_pretrained(llama(), tmp_path / "out")), logits(expected))


class OfAnotherLibrary(torch.nn.Linear):
    config = "none of Hugging Face's"

    def save_pretrained(self) -> None:
        raise AssertionError


class Plain(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.head = OfAnotherLibrary(2, 2)


@pytest.mark.parametrize(
    ("plain", "options", "told"),
    [
        (True, {}, "unclear which Hugging Face model .* configuration of no model"),
        (False, {"prefix": "modle."}, "configuration of 'model'"),
        (False, {"to": "hugging face"}, "convert.to='hugging face'"),
        (False, {"to": "checkpoint"}, "--to hf"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    plain: bool, options: dict[str, Any], told: str, by_one_process: Path, tmp_path: Path
) -> None:  # L-08
    checkpoint, out = by_one_process, tmp_path / "out"
    if plain:
        checkpoint, fit = tmp_path / "plain", quiet()
        fit.fit(Plain(), loader(4, 4))
        fit.save_checkpoint(checkpoint)
        assert load(checkpoint).manifest.metadata.pretrained == {}
    arguments = {"out": out, "to": "hf", **options}
    with pytest.raises(CheckpointError, match=told):
        convert(checkpoint, arguments.pop("out"), **arguments)
    assert not out.exists()


def test_no_folder_is_written_twice(by_one_process: Path, tmp_path: Path) -> None:  # L-08
    assert "  models  model (LlamaForCausalLM)\n" in show(by_one_process)
    for prefix in ("", "model."):
        convert(by_one_process, tmp_path / f"out{prefix}", to="hf", prefix=prefix)
    assert files(tmp_path / "out") == files(tmp_path / "outmodel.")
    with pytest.raises(CheckpointError, match=r"out/model.safetensors' exists already"):
        convert(by_one_process, tmp_path / "out", to="hf")


TOKENS: Any = torch.randint(VOCABULARY, (32, LENGTH), generator=torch.Generator().manual_seed(1))


class Adapter(TrainModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(7)
            lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
            self.model = get_peft_model(llama(seed, tied=False), lora)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)


def adapter_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if "lora" in name}


def _run(strategy: str, world: int, folder: Path, epochs: int, path: Any = None, seed: int = 0) -> str:
    """Train, and return the text of the error, if there is one."""
    checkpoints = Checkpoint(folder / "c", trainable_only=True, save_top_k=-1)
    settings: dict[str, Any] = {"devices": world, "max_epochs": epochs, "default_root_dir": folder, "seed": 1}
    settings |= {"enable_checkpointing": True, "callbacks": [checkpoints, EMAWeightAveraging(0.5)]}
    fit = quiet(strategy=STRATEGIES[strategy](), **settings)
    with failing() as error:
        fit.fit(Adapter(seed), DataLoader(TOKENS, batch_size=8 // world), ckpt_path=path)
    return error["text"]


def saved(folder: Path, epoch: int) -> Path:
    (path,) = (folder / "c").glob(f"epoch={epoch}-*")
    return path


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("ddp", 2), ("fsdp", 2)),
        (("fsdp", 2), ("zero 3", 2)),
        (("zero 3", 2), ("single", 1)),
        (("zero 1", 2), ("ddp", 2)),
        (("zero 2", 2), ("zero 1", 2)),
    ],
    ids=str,
)
def test_an_adapter_is_saved_without_its_base_and_resumed_elsewhere(first: Any, second: Any, tmp_path: Path) -> None:
    # L-08
    assert not any(on_ranks(_run, first[1], *first, tmp_path, 1, process_group=None, timeout=120))
    path = saved(tmp_path, 0)
    assert all("lora" in name for name in load(path).weights())
    assert sum(one.stat().st_size for one in path.rglob("*.safetensors")) < 60_000  # the model has 90 kB of weights
    assert not any(on_ranks(_run, second[1], *second, tmp_path, 2, path, process_group=None, timeout=120))
    weights, averages = load(saved(tmp_path, 1)).weights(), load(saved(tmp_path, 1)).averages()
    by_hand = train_by_hand(Adapter(), [*TOKENS.split(8)], epochs=2)
    assert_near(dict(weights), adapter_of(by_hand), rtol=1e-5)
    for averaged, wanted in ((False, weights), (None, averages)):
        adapter = adapter_of(Adapter.load_from_checkpoint(saved(tmp_path, 1), averaged=averaged))
        assert_near(adapter, {name: wanted[name] for name in adapter}, rtol=1e-5)
    with pytest.raises(CheckpointError, match="trained on another base"):
        Adapter.load_from_checkpoint(path, seed=1)
    for error in on_ranks(_run, second[1], *second, tmp_path, 2, path, 1, process_group=None, timeout=120):
        assert "was trained on another base" in error
