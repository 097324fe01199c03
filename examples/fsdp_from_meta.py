"""A transformer that no rank ever holds completely. It is built on the meta device, sharded and then initialized.

python examples/fsdp_from_meta.py [--devices 4] [--width 512]
"""

from __future__ import annotations

import argparse
import resource
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Callback, Fit, RunContext, TrainModule
from drivetrain_strategies import FSDPStrategy

LENGTH = 32  # bytes that the model sees at once
MIB = 2**20


class Transformer(TrainModule):
    """Predicts the next byte."""

    def __init__(self, width: int, depth: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.blocks: nn.TransformerEncoder | None = None
        self.peak_before = 0

    def configure_model(self) -> None:
        """Build the layers on the meta device. After sharding, each rank initializes its shards."""
        if self.blocks is not None:
            return
        self.peak_before = peak_memory()
        width, depth = self.hparams.width, self.hparams.depth
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        for matrix in (parameter for parameter in self.parameters() if parameter.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def loss(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, self.device)
        assert self.blocks is not None
        hidden = self.blocks(self.bytes(text[:, :-1]) + self.positions.weight, mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, text: Tensor) -> Tensor:
        return self.loss(text)

    def validation_step(self, text: Tensor) -> None:
        self.log("held_out_loss", self.loss(text))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class MemoryReport(Callback):
    """Prints the memory of each rank and the validation loss, and saves the sharded model after training."""

    def on_fit_start(self, trainer: RunContext, module: Transformer) -> None:
        growth = peak_memory() - module.peak_before
        whole = sum(parameter.nbytes for parameter in module.parameters())
        local = sum(parameter.to_local().nbytes for parameter in module.parameters())  # type: ignore[attr-defined]
        trainer.print(f"The whole model is {whole / MIB:.1f} MiB of parameters")
        for rank, (shards, peak) in enumerate(module.all_gather(torch.tensor([local, growth])).tolist()):
            trainer.print(
                f"Rank {rank} holds {shards / MIB:.1f} MiB, and its memory grew by at most {peak / MIB:.1f} MiB"
            )

    def on_validation_end(self, trainer: RunContext, module: Transformer) -> None:
        trainer.print(f"Step {trainer.global_step}: held-out loss {trainer.callback_metrics['held_out_loss']:.3f}")

    def on_train_end(self, trainer: RunContext, module: Transformer) -> None:
        trainer.save_checkpoint("runs/fsdp_from_meta")
        trainer.print("Saved in runs/fsdp_from_meta")


def peak_memory() -> int:
    """Return the peak memory of this process in bytes (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args()

    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py")))
    texts = torch.tensor(list(source[: 48 * (LENGTH + 1)])).view(-1, LENGTH + 1)
    train_loader = DataLoader(texts[:-16], batch_size=8 // options.devices, shuffle=True)
    val_loader = DataLoader(texts[-16:], batch_size=16 // options.devices)
    strategy = FSDPStrategy(gather_limit=0)  # the weights are not gathered after the run either
    fit = Fit(
        strategy=strategy, devices=options.devices, accelerator="cpu", max_epochs=2, seed=0, callbacks=MemoryReport()
    )
    fit.fit(Transformer(options.width), train_loader, val_loader)


if __name__ == "__main__":
    main()
