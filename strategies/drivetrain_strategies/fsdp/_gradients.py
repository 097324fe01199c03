"""Controls the exchange, accumulation and zeroing of gradients in a sharded run, and which parameters require them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain.errors import ConfigurationError, listed
from drivetrain.strategies import ControlPlane, average_gradients, changed_within_window_error
from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._unsplit_gradients import UnsplitGradients

logger = logging.getLogger("drivetrain")


class Gradients:
    """The gradients of sharded and of replicated parameters.

    A parameter that no rank used gets no gradient, as in a single process. A rank that did not use a parameter sends a
    gradient of zeros, since the other ranks wait for one. A parameter that no rank used would therefore get a gradient
    of zeros instead of none, and weight decay would act on the parameter.

    In the first synchronized window the ranks agree, over the store, whether any gradient was missing. If no gradient
    was missing, later steps do no extra work. Otherwise, every window sums a flag per parameter over the CPU group, so
    that all ranks know which parameters no rank used. If a parameter becomes unused only later, a warning names the
    parameter once.

    Args:
        sharded: the sharded module.
        replicated: parameters that every rank holds whole.
        group: the process group of the ranks that read different data.
        control: the control plane.
        find_unused: True sums the flags of unused parameters in every window, False never does, and None decides in the
            first window.
        unsplit: compares the gradients of unsplit parameters; None without tensor parallelism.
        reshard_after_backward: drop gathered parameters after every backward of an accumulation window. False drops
            gathered parameters only after the window's last backward.
    """

    def __init__(
        self,
        sharded: Sharded,
        replicated: Sequence[nn.Parameter],
        group: Any,
        control: ControlPlane,
        find_unused: bool | None,
        unsplit: UnsplitGradients | None,
        reshard_after_backward: bool,
    ) -> None:
        self._sharded = sharded
        self._replicated = list(replicated)
        self._group = group
        self._control = control
        self._find_unused = self._counts_unused = find_unused
        self._warned = False
        self._unsplit = unsplit
        self._reshard_after_backward = reshard_after_backward
        self._exchange_enabled = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them within this context."""
        self._sharded.set_gradient_sync(False)
        if not self._reshard_after_backward:
            self._sharded.set_reshard_after_backward(False)
        self._exchange_enabled = False
        try:
            yield
        finally:
            self._exchange_enabled = True
            self._sharded.set_gradient_sync(True)
            self._sharded.set_reshard_after_backward(True)

    @contextmanager
    def zeroed(self) -> Iterator[None]:
        """Make a backward add exactly zero to every gradient within this context."""
        handles = [
            parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
            for parameter in self._replicated
            if parameter.requires_grad
        ]
        try:
            with self._sharded.zeroed_gradients():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def requiring_only(self, parameters: set[int]) -> Iterator[None]:
        """Within this context, let only the parameters with the given ids require gradients."""
        tensors = [fsdp_param.tensors() for fsdp_param in self._sharded.parameters]
        tensors += [[parameter] for parameter in self._replicated]
        others = [each for each in tensors if each[0].requires_grad and id(each[0]) not in parameters]
        for tensor in (tensor for each in others for tensor in each):
            tensor.requires_grad_(False)
        try:
            yield
        finally:
            for tensor in (tensor for each in others for tensor in each):
                tensor.requires_grad_(True)

    def trainable_changed(self, module: nn.Module) -> None:
        """Adapt to the current set of trainable parameters of ``module``, whose parameters are shards.

        `fully_shard` reads ``requires_grad`` when it gathers a parameter, so only the dtypes that it derived in the
        first forward are recomputed. The next window determines the unused parameters again. Does not communicate.

        Raises:
            ConfigurationError: a layer was created.
        """
        sharded_ids = {id(fsdp_param.sharded_param) for fsdp_param in self._sharded.parameters}
        known_ids = {id(parameter) for parameter in self._replicated} | sharded_ids
        created = [name for name, parameter in module.named_parameters() if id(parameter) not in known_ids]
        if created:
            raise ConfigurationError(
                f"A layer was created within a run, under FSDP: {listed(created)}.",
                "parameters are sharded before the first step. Gradients of new parameters would not be exchanged, and "
                "every rank would train its own copy.",
                "build the layer in configure_model and freeze it until it is needed, or use strategy='ddp'.",
            )
        self._sharded.trainable_changed()
        self._counts_unused = self._find_unused
        self._warned = False
        if self._unsplit is not None:
            self._unsplit.restart()

    def refuse_changes_while_gathered(self) -> None:
        """Refuse changes to ``requires_grad`` or to frozen values that were made while parameters were gathered.

        torch silently drops such changes.

        Raises:
            ConfigurationError: names the parameters.
        """
        sharded = self._sharded
        if updated := sharded.updated_while_gathered():
            sharded.reshard()
            raise gathered_update_error(updated)
        if toggled := sharded.toggled_while_gathered():
            sharded.reshard()
            raise changed_within_window_error(toggled, "FSDPStrategy")

    def after_backward(self) -> None:
        """Finish the exchange of gradients. Collective, except while gradients are accumulated."""
        if not self._exchange_enabled:
            return
        self._clear_unused()
        if self._replicated:
            average_gradients(self._replicated, self._group)
        if self._unsplit is not None:
            self._unsplit.compare()

    def _clear_unused(self) -> None:
        """Remove the zero gradients of parameters that no rank used. Collective if the flags are summed."""
        sharded, control = self._sharded, self._control
        unused = sharded.take_unused()
        if self._counts_unused is None:
            (missing_anywhere,) = control.count_flags("parameters without a gradient", bool(unused))
            self._counts_unused = missing_anywhere > 0
        if self._counts_unused:
            flags = torch.zeros(len(sharded.parameters), dtype=torch.int32)
            for parameter in unused:
                flags[parameter.position] = 1
            counts = control.all_reduce_async(flags)()
            for parameter in unused:
                if int(counts[parameter.position]) == control.world_size:
                    parameter.sharded_param.grad = None
        elif unused and not self._warned:
            self._warned = True
            logger.warning(
                "Parameters that all got a gradient in the first step got none on this rank: %s. Their gradients count "
                "as zero. With FSDPStrategy(find_unused_parameters=True), parameters that no rank uses get none.",
                listed([parameter.plain_name for parameter in unused]),
            )


def gathered_update_error(names: Sequence[str]) -> ConfigurationError:
    """Return the error for an update of weights by user code that would be lost."""
    return ConfigurationError(
        f"User code updated weights under FSDPStrategy: {listed(list(names))}.",
        "the update changed gathered copies, which are dropped after the step, but not the shards.",
        "update the weights in on_train_batch_end, where the module holds the shards.",
    )
