"""Networks for tests of sharded runs: repeated blocks, ties, experts, scalar parameters; and how they are trained."""

from __future__ import annotations

from typing import Any

import torch
from small_runs import FEATURES, Regression, data, global_batches, loader, seeded, train_by_hand, trained, weights
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain_strategies import FSDPStrategy

WIDTH = 8


class Block(nn.Module):
    """Keeps its input's shape (n, width)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Deep(nn.Module):
    """A stem, blocks and a head: (n, 4) to (n, 1)."""

    def __init__(self, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.blocks: Any = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class DeepRegression(Regression):
    """`Deep` with mean squared error and AdamW."""

    def __init__(self, net: nn.Module | None = None, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.net = seeded(Deep) if net is None else net

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, eps=1e-5, weight_decay=0.1)


class TwiceDeep(Deep):
    """Every block runs twice in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class Tied(Deep):
    """Two blocks share a matrix, and the root has a parameter list and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(WIDTH))])
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scales[0] * self.scales[1]
        for block in self.blocks:
            x = self.empty(block(x))
        return self.head(x) / self.temperature


class Experts(nn.Module):
    """Routes each sample by the sign of its first feature; an expert without samples does not run."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(3 if unused else 2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        route = (x[:, 0] > 0).long()
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            chosen = route == number
            if bool(chosen.any()):
                out[chosen] = expert(hidden[chosen])
        return self.head(out)


def one_expert_per_rank() -> TensorDataset:
    """Return samples in an order in which rank 0's batches of 4 go to one expert and rank 1's to the other."""
    x, y = data(32).tensors
    order = x[:, 0].argsort()
    half = torch.stack([order[:16].view(4, 4), order[16:].view(4, 4)], 1).flatten()
    return TensorDataset(x[half], y[half])


def trained_on_shards(module: Any, options: dict[str, Any], samples: int = 32, **settings: Any) -> Tensor:
    """Train on this rank's batches of 4 under `FSDPStrategy`, and return the weights."""
    return trained(module, loader(samples, 4), strategy=FSDPStrategy(**options), **settings)


def trained_in_plain_torch(module: Any, samples: int = 32, ranks: int = 2, window: int = 1, epochs: int = 1) -> Tensor:
    """Train on the batches of all ranks, in one process without drivetrain, and return the weights."""
    return weights(train_by_hand(module, global_batches(samples, 4 * ranks), window, epochs=epochs))
