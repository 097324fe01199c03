"""Replaces BatchNorm by SyncBatchNorm during a run."""

from __future__ import annotations

from torch import nn


class SyncBatchNormSwap:
    """Replaces every BatchNorm layer of ``module`` by SyncBatchNorm. Parameters and buffers stay the same objects."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # A layer may be registered under several names, and torch replaces only the first registration.
        before = dict(module.named_modules(remove_duplicate=False))
        nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        successors = {
            id(before[name]): child
            for name, child in module.named_modules()
            if isinstance(child, nn.SyncBatchNorm) and child is not before[name]
        }
        self._replaced = {name: child for name, child in before.items() if id(child) in successors}
        for name, original in self._replaced.items():
            self._assign(name, successors[id(original)])

    def undo(self) -> None:
        """Put the original layers back, with the current parameters and buffers of the SyncBatchNorm layers."""
        for name, original in self._replaced.items():
            successor = self._module.get_submodule(name)
            original._parameters.update(successor._parameters)
            original._buffers.update(successor._buffers)
            original.train(successor.training)
            self._assign(name, original)

    def _assign(self, name: str, layer: nn.Module) -> None:
        parent, _, attribute = name.rpartition(".")
        setattr(self._module.get_submodule(parent), attribute, layer)
