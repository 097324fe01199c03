"""Ways to save and load a network with its optimizer: plain safetensors, which shows the disk speed, and ours."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.by_engine import Trained
from drivetrain import Fit
from drivetrain._format import file_writer, tensor_reader
from drivetrain.checkpoint import SaveRequest, load

Wait = Callable[[], None]


class State:
    """A net and its optimizer, which every way saves and loads.

    Args:
        net: trained for a step at least, so that the optimizer has moments.
        optimizer: over all parameters of the net.
    """

    def __init__(self, net: nn.Module, optimizer: Optimizer) -> None:
        self.net = net
        self.optimizer = optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Return everything by name, as it is now; loading puts other tensors into the optimizer."""
        found = dict(self.net.state_dict())
        for name, parameter in self.net.named_parameters():
            found.update({f"{name}/{key}": value for key, value in self.optimizer.state[parameter].items()})
        return found

    def restart(self) -> None:
        """Create the state before loading: weights that are to be replaced, and an optimizer without moments."""
        self.optimizer.state.clear()
        for tensor in self.net.state_dict().values():
            tensor.zero_()

    def checksums(self) -> dict[str, float]:
        return {name: float(tensor.double().sum()) for name, tensor in self.tensors().items()}


class Way(Protocol):
    """One way to save and load.

    Attributes:
        name: for the tables.
        syncs: whether a save is flushed to the disk, instead of only to its cache.
        checks: whether loading notices that a byte has changed.
    """

    name: str
    syncs: bool
    checks: bool

    def save(self, folder: Path) -> None:
        """Save into a folder that does not exist yet."""

    def load(self, folder: Path) -> None:
        """Load into the net and the optimizer."""


class Disk:
    """One file of safetensors."""

    name, syncs, checks = "safetensors alone", False, False

    def __init__(self, state: State) -> None:
        self._state = state

    def save(self, folder: Path) -> None:
        folder.mkdir()
        save_file(self._state.tensors(), folder / "all.safetensors")

    def load(self, folder: Path) -> None:
        saved = load_file(folder / "all.safetensors")
        net, optimizer = self._state.net, self._state.optimizer
        net.load_state_dict({name: saved.pop(name) for name in net.state_dict()})
        parameters = dict(net.named_parameters())
        for name, value in saved.items():
            owner, _, key = name.rpartition("/")
            optimizer.state[parameters[owner]][key] = value.clone()

    def read(self, folder: Path) -> None:
        for tensor in load_file(folder / "all.safetensors").values():
            tensor.sum()  # memory-mapped: nothing is read until it is accessed


class Pickle:
    """torch.save, with what PyTorch's tutorial puts into it."""

    name, syncs, checks = "torch.save", False, False

    def __init__(self, state: State) -> None:
        self._state = state

    def save(self, folder: Path) -> None:
        folder.mkdir()
        saved = {"net": self._state.net.state_dict(), "optimizer": self._state.optimizer.state_dict()}
        torch.save(saved, folder / "all.pt")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "all.pt")
        self._state.net.load_state_dict(saved["net"])
        self._state.optimizer.load_state_dict(saved["optimizer"])

    def read(self, folder: Path) -> None:
        torch.load(folder / "all.pt")


class Ours:
    """A run's own checkpoint, as `Checkpoint` and ``ckpt_path`` write and read it."""

    name, syncs, checks = "drivetrain", True, True

    def __init__(self, module: Trained) -> None:
        assert isinstance(module.trainer, Fit)
        self._trainer = module.trainer

    def save(self, folder: Path) -> None:
        self._trainer.save_checkpoint(folder)

    def load(self, folder: Path) -> None:
        checkpoint, strategy = load(folder), self._trainer.strategy
        strategy.load_model_state(checkpoint.weights().staged())
        strategy.load_optimizer_state(checkpoint.optimizer_state(), 0)

    def read(self, folder: Path) -> None:
        checkpoint = load(folder)
        for part in checkpoint.manifest.parts():
            for source in checkpoint.tensors(part).values():
                source.read()  # read it all, since its checksum covers all of it

    def begin(self, folder: Path) -> Wait:
        self._trainer.save(SaveRequest(str(folder), background=True))
        checkpoints: Any = self._trainer.run_state.checkpoints
        finish: Wait = checkpoints.finish
        return finish


class Slower(Ours):
    """The same without the extra `fast`."""

    name = "drivetrain without `fast`"

    def save(self, folder: Path) -> None:
        with _zlib():
            super().save(folder)

    def load(self, folder: Path) -> None:
        with _zlib():
            super().load(folder)

    def read(self, folder: Path) -> None:
        with _zlib():
            super().read(folder)


def _zlib() -> AbstractContextManager[object]:
    stack = ExitStack()
    for module in (file_writer, tensor_reader):
        stack.enter_context(patch.object(module, "crc32", zlib.crc32))
    return stack
