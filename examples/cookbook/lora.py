"""LoRA on a Hugging Face model: train an adapter with 1% of the weights, and save it without the base model.

Common mistake: loading an adapter into another base model than the one it was trained on (another revision, a quantized
copy). Any model of the same shape accepts the adapter without an error, but the output is useless.
`Checkpoint(trainable_only=True)` stores checksums of the base model, and loading compares them. Also, `from_pretrained`
returns the model in eval mode, in which there is no dropout, so call `train()`.
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from drivetrain import CheckpointError, Fit, TrainModule, seed_everything
from drivetrain.callbacks import Checkpoint


class Adapted(TrainModule):
    def __init__(self, base: str):
        super().__init__()
        self.save_hyperparameters()
        model = AutoModelForCausalLM.from_pretrained(base).train()
        self.model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))

    def training_step(self, tokens):
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=2e-2, fused=True)


def pretrained(folder: Path, seed: int) -> str:
    """Create and save a small model in place of a download."""
    seed_everything(seed)
    size = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **size)).save_pretrained(folder)
    return str(folder)


def nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def main(folder: Path) -> None:
    base, another = pretrained(folder / "base", 0), pretrained(folder / "another", 1)
    text = (b"the quick brown fox jumps over the lazy dog. " * 40)[: 48 * 32]
    loader = DataLoader(torch.tensor(list(text)).view(48, 32), batch_size=8, shuffle=True)
    module = Adapted(base)
    frozen = module.model.get_input_embeddings().weight.clone()
    fit = Fit(
        max_epochs=8, callbacks=Checkpoint(folder / "adapter", trainable_only=True, save_weights_only=True), seed=0
    )
    fit.fit(module, loader)

    adapter = Path(fit.checkpoint_callback.last_model_path)
    loaded = Adapted.load_from_checkpoint(adapter)
    assert torch.equal(loaded.model.get_input_embeddings().weight, frozen)
    print(f"The loss is {fit.callback_metrics['loss_epoch']:.2f}, and was {torch.tensor(256).log():.2f} at the start")
    print(f"The adapter takes {nbytes(adapter):,} bytes, the base model {nbytes(Path(base)):,}")
    try:
        Adapted.load_from_checkpoint(adapter, base=another)
    except CheckpointError as error:
        print(f"With another base model: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
