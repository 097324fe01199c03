"""Streaming data: an iterable dataset that is sharded across ranks and workers and resumes where a run was stopped.

Common mistake: not sharding the iterable. Every rank and every worker has its own copy of an iterable and would read
everything. Also, a resumed run must read and discard everything before its position, which takes hours for a
large corpus. An iterable with `state_dict` and `load_state_dict` is instead restored to the first piece that was not
*trained on*. Pieces that had been read ahead are read again.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Fit, TrainModule, seed_everything
from drivetrain.data import split_by_rank

LENGTH = 65  # bytes per piece


class Pieces(IterableDataset):
    """Yields pieces of `LENGTH` bytes. Each file is read by one worker of one rank."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.file = self.piece = 0  # indices of the next file and of the next piece in it
        self.pieces_read = 0

    def __iter__(self):
        own_files = list(split_by_rank(self.files))
        while self.file < len(own_files):
            text = own_files[self.file].read_bytes()
            while (self.piece + 1) * LENGTH <= len(text):
                start = self.piece * LENGTH
                self.piece += 1
                self.pieces_read += 1
                yield torch.tensor(list(text[start : start + LENGTH]))
            self.file, self.piece = self.file + 1, 0
        self.file = 0  # the next epoch starts with the first file

    def state_dict(self):
        return {"file": self.file, "piece": self.piece}

    def load_state_dict(self, state):
        self.file, self.piece = state["file"], state["piece"]


class Bigrams(TrainModule):
    """Predicts each byte from the previous one."""

    def __init__(self):
        super().__init__()
        self.next = nn.Embedding(256, 256)

    def training_step(self, text):
        return F.cross_entropy(self.next(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def train(steps: int, ckpt_path: str | None = None) -> tuple[Fit, Bigrams, int]:
    seed_everything(0)
    data, module = Pieces(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))), Bigrams()
    fit = Fit(max_steps=steps, seed=0)
    fit.fit(module, DataLoader(data, batch_size=16), ckpt_path=ckpt_path)
    return fit, module, data.pieces_read


def main() -> None:
    _, uninterrupted, whole = train(300)
    stopped, _, part = train(200)
    _, resumed, rest = train(300, ckpt_path=stopped.checkpoint_callback.last_model_path)
    print(f"Pieces read: {whole} in one run; {part} before a stop and {rest} after it")
    print(f"The weights are the same: {torch.equal(uninterrupted.next.weight, resumed.next.weight)}")


if __name__ == "__main__":
    main()
