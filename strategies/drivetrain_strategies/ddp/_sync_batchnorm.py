"""SyncBatchNorm for the length of a run."""

from __future__ import annotations

from torch import nn


class SyncBatchNormSwap:
    """Puts SyncBatchNorm in the place of every BatchNorm of ``module``; parameters and buffers stay the same."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # One layer may stand in several places, of which torch replaces the first.
        before = dict(module.named_modules(remove_duplicate=False))
        nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        successors = {
            id(before[name]): child
            for name, child in module.named_modules()
            if isinstance(child, nn.SyncBatchNorm) and child is not before[name]
        }
        self._replaced = {name: child for name, child in before.items() if id(child) in successors}
        for name, original in self._replaced.items():
            self._put(name, successors[id(original)])

    def undo(self) -> None:
        """Put the original layers back, with what the run taught their successors."""
        for name, original in self._replaced.items():
            successor = self._module.get_submodule(name)
            original._parameters.update(successor._parameters)
            original._buffers.update(successor._buffers)
            original.train(successor.training)
            self._put(name, original)

    def _put(self, name: str, layer: nn.Module) -> None:
        parent, _, attribute = name.rpartition(".")
        setattr(self._module.get_submodule(parent), attribute, layer)
