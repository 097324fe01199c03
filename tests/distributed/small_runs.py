"""Components for tests of runs on several ranks: small modules, small data, a `Fit` without output."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

FEATURES = 4

TIGHT: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
"""How near to the reference float32 comes on several ranks (B-01)."""

TIGHTER: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}
"""The same after a few steps of SGD."""

SHARD_EVERYTHING: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
"""Options of `DeepSpeedStrategy` with which it also shards the small parameters of tests (E-13)."""

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "single_device",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "hsdp": lambda: FSDPStrategy(sharding="hybrid"),
    "zero 1": lambda: DeepSpeedStrategy(stage=1),
    "zero 2": lambda: DeepSpeedStrategy(stage=2),
    "zero 3": lambda: DeepSpeedStrategy(**SHARD_EVERYTHING),
}


def quiet(**settings: Any) -> Fit:
    """Return a `Fit` on the CPU with nothing but the loop, for as many ranks as there are."""
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return Fit(**{**options, **settings})


def about(what: object) -> Callable[[str], str]:
    """Return a function that puts ``what`` before a message of `torch.testing.assert_close`."""
    return lambda text: f"{what}: {text}"


def assert_near(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], rtol: float = 1e-6) -> None:
    """Compare weights by name; the message names those that differ."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=rtol, msg=about(name))


def data(samples: int) -> TensorDataset:
    """Return inputs of shape (samples, 4) and targets of shape (samples, 1); the same on every call."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, FEATURES, generator=generator), torch.randn(samples, 1, generator=generator)
    )


def loader(samples: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size=batch_size, **options)


def seeded(build: Callable[[], Any]) -> Any:
    """Build a module with the same weights everywhere, without changing the process's generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


class Regression(TrainModule):
    """A two-layer network with mean squared error, trained with SGD."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.lr = lr

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Counting(Callback):
    """Has state that checkpoints contain."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: Any) -> None:
        self.batches = state_dict["batches"]


class Saver(Callback):
    """Writes a checkpoint at the end of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class SaveAt(Callback):
    """Writes a checkpoint at the end of a step."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def weights(module: nn.Module) -> torch.Tensor:
    """Return all parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def trained(module: Any, batches: Any, validation: Any = None, ckpt_path: Any = None, **settings: Any) -> torch.Tensor:
    """Train with these settings of `quiet`, and return the weights."""
    quiet(**settings).fit(module, batches, validation, ckpt_path=ckpt_path)
    return weights(module)


def refusal(module: Any, batches: Any, validation: Any = None, **settings: Any) -> str:
    """Train, and return the error as "Type: text"."""
    with failing() as error:
        quiet(**settings).fit(module, batches, validation)
    return f"{error['type']}: {error['text']}"


def train_by_hand(module: Any, batches: list[Any], window: int = 1, step: Any = None, epochs: int = 1) -> Any:
    """Train the reference: one process, plain PyTorch, windows weighted by samples; returns the module.

    Written by hand: for modules of tests, which programs of the oracle do not describe.
    """
    optimizer = module.configure_optimizers()
    for start in [*range(0, len(batches), window)] * epochs:
        parts = batches[start : start + window]
        total = sum(len(part[0]) for part in parts)
        optimizer.zero_grad()
        for offset, part in enumerate(parts):
            loss = (step or module.training_step)(part, start + offset)
            (loss * (len(part[0]) / total)).backward()
        optimizer.step()
    return module


def global_batches(samples: int, size: int) -> list[Any]:
    """Yield the batches that one process would use in the data's order."""
    x, y = data(samples).tensors
    return [(x[start : start + size], y[start : start + size]) for start in range(0, samples, size)]


def each(run: Callable[..., Any], *cases: tuple[Any, ...]) -> list[Any]:
    """Return what ``run`` returns for each case, in one start of the processes."""
    return [run(*case) for case in cases]


class failing:
    """Catch an error and record it; the process continues, as in a notebook.

    It is a class, because from Python 3.12 on an error that a generator's context manager catches is in a reference
    cycle, so that only the garbage collector frees it and what its frames refer to.
    """

    def __enter__(self) -> dict[str, str]:
        self.caught = {"type": "nothing was raised", "text": ""}
        return self.caught

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.caught["type"], self.caught["text"] = type(error).__name__, str(error)
        return True


@contextlib.contextmanager
def counting_collectives() -> Iterator[Counter[str]]:
    """Count every collective of this process, including those that DDP's reducer issues in C++."""
    counts: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        yield counts
    for event in profiler.events() or []:
        if event.name.startswith("c10d::"):
            counts[event.name.removeprefix("c10d::").rstrip("_")] += 1
