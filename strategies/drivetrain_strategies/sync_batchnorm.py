"""SyncBatchNorm for the length of a run."""

from __future__ import annotations

from torch import nn


class SyncBatchNormSwap:
    """Puts SyncBatchNorm in the place of every BatchNorm of ``module``; parameters and buffers stay the same."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        before = dict(module.named_modules())
        nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        self._replaced = {
            name: before[name]
            for name, child in module.named_modules()
            if isinstance(child, nn.SyncBatchNorm) and child is not before[name]
        }

    def undo(self) -> None:
        """Put the original layers back, with what the run taught their successors."""
        for name, original in self._replaced.items():
            parent_name, _, attribute = name.rpartition(".")
            parent = self._module.get_submodule(parent_name)
            successor = getattr(parent, attribute)
            original._parameters.update(successor._parameters)
            original._buffers.update(successor._buffers)
            original.train(successor.training)
            setattr(parent, attribute, original)
