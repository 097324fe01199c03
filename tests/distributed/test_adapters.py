"""PEFT's LoRA on a Llama of Hugging Face, trained and saved without its base model. Row L-08."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import STRATEGIES, assert_near, failing, quiet, train_by_hand
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain import TrainModule
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging
from drivetrain.checkpoint import load
from drivetrain.errors import CheckpointError
from drivetrain.testing import requires_package
from worlds import DEEPSPEED, on_ranks, preload

pytestmark = requires_package("peft")
preload(*DEEPSPEED, "transformers.models.llama.modeling_llama", "peft")

VOCABULARY, LENGTH, SAMPLES = 32, 8, 32


def llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=LENGTH))


class Adapter(TrainModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(7)
            lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
            self.model = get_peft_model(llama(seed), lora)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)


class Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


def adapter_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if "lora" in name}


def _run(strategy: str, world: int, folder: Path, epochs: int, path: Any = None, seed: int = 0) -> str:
    """Train, and return the text of the error, if there is one."""
    checkpoints = Checkpoint(folder / "c", trainable_only=True, save_top_k=-1)
    settings: dict[str, Any] = {"devices": world, "max_epochs": epochs, "default_root_dir": folder, "seed": 1}
    settings |= {"enable_checkpointing": True, "callbacks": [checkpoints, EMAWeightAveraging(0.5)]}
    fit = quiet(strategy=STRATEGIES[strategy](), **settings)
    with failing() as error:
        fit.fit(Adapter(seed), DataLoader(Tokens(), batch_size=8 // world), ckpt_path=path)
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
def test_an_adapter_is_saved_without_its_base_and_resumed_under_another_strategy(
    first: tuple[str, int], second: tuple[str, int], tmp_path: Path
) -> None:  # L-08
    assert not any(on_ranks(_run, first[1], *first, tmp_path, 1, process_group=None, timeout=120))
    path = saved(tmp_path, 0)
    assert all("lora" in name for name in load(path).weights())
    assert sum(one.stat().st_size for one in path.rglob("*.safetensors")) < 60_000  # the model has 90 kB of weights
    assert not any(on_ranks(_run, second[1], *second, tmp_path, 2, path, process_group=None, timeout=120))
    weights, averages = load(saved(tmp_path, 1)).weights(), load(saved(tmp_path, 1)).averages()
    by_hand = train_by_hand(Adapter(), [*DataLoader(Tokens(), batch_size=8)], epochs=2)
    assert_near(dict(weights), adapter_of(by_hand), rtol=1e-5)
    for averaged, wanted in ((False, weights), (None, averages)):
        adapter = adapter_of(Adapter.load_from_checkpoint(saved(tmp_path, 1), averaged=averaged))
        assert_near(adapter, {name: wanted[name] for name in adapter}, rtol=1e-5)
    with pytest.raises(CheckpointError, match="trained on another base"):
        Adapter.load_from_checkpoint(path, seed=1)
    for error in on_ranks(_run, second[1], *second, tmp_path, 2, path, 1, process_group=None, timeout=120):
        assert "was trained on another base" in error
