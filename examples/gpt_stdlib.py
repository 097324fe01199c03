"""A byte-level GPT that learns to write Python from the source of Python's own standard library.

python examples/gpt_stdlib.py
python examples/gpt_stdlib.py --strategy ddp --devices 2 --accelerator cpu
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import LearningRateMonitor, ThroughputMonitor
from drivetrain.loggers import CSVLogger

LENGTH = 128  # bytes that the model sees at once
PAD = 0  # a byte that no source file contains; it starts every text and pads the shorter texts of a batch


class GPT(TrainModule):
    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, lr: float = 6e-3):
        super().__init__()
        self.save_hyperparameters()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        for matrix in (parameter for parameter in self.parameters() if parameter.dim() == 2):
            nn.init.normal_(matrix, std=0.02)
        self.head.weight = self.bytes.weight  # tied weights work under every strategy

    def forward(self, text: Tensor) -> Tensor:  # (batch, time) -> (batch, time, 256)
        embedded = self.bytes(text) + self.positions.weight[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], self.device)
        return self.head(self.blocks(embedded, mask, is_causal=True))

    def loss(self, text: Tensor) -> Tensor:
        """Return the mean loss over all bytes except padding, in nats per byte."""
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten(), ignore_index=PAD)

    def batch_weight(self, text: Tensor) -> int:  # the number of bytes that the loss is averaged over
        return int((text[:, 1:] != PAD).sum())

    def training_step(self, text: Tensor) -> Tensor:
        loss = self.loss(text)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, text: Tensor) -> None:
        self.log("held_out_loss", self.loss(text), batch_size=self.batch_weight(text))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, fused=True)
        steps = self.trainer.estimated_stepping_batches  # warm-up for a tenth of the steps, then cosine decay
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str) -> str:
        text = torch.tensor([[PAD, *prompt.encode()]], device=self.device)
        while text.shape[1] < LENGTH:
            probabilities = self(text)[0, -1].div(0.7).softmax(-1)
            text = torch.cat([text, probabilities.multinomial(1)[None]], dim=1)
        return bytes(text[0, 1:].tolist()).decode(errors="backslashreplace")


def wrap_text(text: str, columns: int = 96) -> str:
    """Format text for the terminal: indented, wrapped after ``columns``, with unprintable characters escaped."""
    escaped = "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
    lines = (line[at : at + columns] for line in escaped.split("\n") for at in range(0, len(line) or 1, columns))
    return "".join(f"    {line}".rstrip() + "\n" for line in lines)


def pieces(files: list[Path]) -> list[bytes]:
    """Split the files into pieces of whole lines with at most `LENGTH` bytes each."""
    texts = [b""]
    for line in (line[:LENGTH] for file in files for line in file.read_bytes().splitlines(keepends=True)):
        if len(texts[-1]) + len(line) > LENGTH:
            texts.append(b"")
        texts[-1] += line
    return texts


def collate(texts: list[bytes]) -> Tensor:
    return pad_sequence([torch.tensor([PAD, *text]) for text in texts], batch_first=True, padding_value=PAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"strategy": "auto", "precision": "32-true", "accelerator": "auto", "devices": "auto"}.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--max-time", default="00:00:02:00", help="time limit, days:hours:minutes:seconds")
    options = parser.parse_args()

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train_set, held_out = pieces([file for file in files if file not in files[::100]]), pieces(files[::100])
    train_loader = DataLoader(train_set, batch_size=8, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(held_out, batch_size=64, collate_fn=collate)
    logger, meter = CSVLogger("runs", "gpt_stdlib"), ThroughputMonitor()
    callbacks = [meter, LearningRateMonitor()]
    settings = {"gradient_clip_val": 1.0, "seed": 1, "log_every_n_steps": 10}
    fit = Fit(**vars(options), **settings, logger=logger, callbacks=callbacks)
    torch.manual_seed(1)
    model = GPT()

    (before,) = fit.test(model, test_loader, verbose=False)
    noise = wrap_text(model.generate("def "))
    fit.print(f"Before training it writes noise (bytes that are not text appear as \\xf3):\n\n{noise}")
    fit.fit(model, train_loader)
    (after,) = fit.test(model, test_loader, verbose=False)

    texts = "\n".join(wrap_text(model.generate(prompt)) for prompt in ("import ", "def ", "class "))
    fit.print(f"\nAfter {fit.global_step} steps it writes:\n\n{texts}")
    for when, loss in ("before", before["held_out_loss"]), ("after", after["held_out_loss"]):
        fit.print(f"Held-out files, {when}: loss {loss:.3f} nats, {loss / math.log(2):.3f} bits per byte")
    if "throughput/tokens_per_sec" in meter.latest:  # not available in the first steps
        fit.print(f"Throughput: {meter.latest['throughput/tokens_per_sec']:,.0f} bytes a second")
    checkpoint = fit.checkpoint_callback.last_model_path
    fit.print(f"""
Files in {logger.log_dir}:
    metrics.csv     loss, learning rate and throughput, a row every {fit.log_every_n_steps} steps
    checkpoints/    the newest checkpoint: weights, optimizer, schedule and position in the data
    hparams.json    the arguments of the model
    run.json        how the run was started and how it ended

What to run next:
    python -m drivetrain.checkpoint show {os.path.relpath(checkpoint)}
    python examples/gpt_stdlib.py --strategy ddp_static_graph --devices 2    (selects another strategy)
    python examples/gpt_stdlib.py --help""")


if __name__ == "__main__":
    main()
