"""Checks that gradients become ready in the same order on all ranks, as ZeRO 2 requires."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import ControlPlane

Order = list[Any]
"""The parameters of a bucket in order, each as DeepSpeed's tuple (group, index in the group, id)."""


class GradientOrder:
    """Compares the order of gradients in each bucket with the first accumulation window, before the bucket is reduced.

    A rank's forward may depend on the values or the number of its samples. BatchNorm, for example, computes differently
    for a single sample. Gradients then become ready in another order, and DeepSpeed would add up gradients of different
    parameters. In the first window the ranks compare their orders, in a small CPU collective per bucket. Afterwards,
    each rank compares its orders with those of the first window and does not communicate.

    Args:
        optimizer: DeepSpeed's optimizer of stage 2.
        names: names of the trainable parameters.
        control: exchanges small values between the ranks.
    """

    def __init__(self, optimizer: Any, names: Mapping[nn.Parameter, str], control: ControlPlane) -> None:
        self._optimizer: Any = optimizer
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._control = control
        self._in_first_window = True
        self._known_orders: list[Order] = []
        self._differing: tuple[Order, Order] | None = None
        self._reduce: Any = optimizer.reduce_ipg_grads
        optimizer.reduce_ipg_grads = self._compare_and_reduce

    def after_backward(self) -> None:
        """Refuse gradients that were reduced in different orders, before the step. Does not communicate.

        Raises:
            ConfigurationError: names the parameters.
        """
        if self._differing is None:
            return
        order, expected = map(self._named, self._differing)
        first = next(number for number, (name, other) in enumerate(zip(order, expected, strict=True)) if name != other)
        raise ConfigurationError(
            f"Gradients became ready in two orders: {order[first]!r} took the position of {expected[first]!r}.",
            "ZeRO 2 exchanges gradients during backward, and ranks with different orders would add up gradients of "
            "different parameters. The order differs if the forward depends on a rank's samples. BatchNorm, for "
            "example, computes differently for a single sample.",
            "set DeepSpeedStrategy(find_unused_parameters=True), which exchanges gradients in the parameters' order, "
            "or use stage 1, stage 3 or strategy='fsdp'.",
        )

    def after_step(self) -> None:
        """End the comparison between ranks after the first window."""
        self._in_first_window = False

    def close(self) -> None:
        """Restore DeepSpeed's own reduction."""
        if self._optimizer is not None:
            self._optimizer.__dict__.pop("reduce_ipg_grads", None)
        self._optimizer = self._reduce = None  # a traceback may keep this object alive

    def _compare_and_reduce(self, comm_dtype: torch.dtype | None = None) -> None:
        for dtype, bucket in self._optimizer.ipg_buckets.items():
            if comm_dtype is None or dtype == comm_dtype:
                self._compare(bucket.params)
        self._reduce(comm_dtype=comm_dtype)

    def _compare(self, order: Order) -> None:
        if not self._in_first_window and order in self._known_orders:
            return
        # In the first window, a second order of the same parameters is an error even on one rank. Later, the rank could
        # not know which of the two orders the other ranks use.
        orders = (
            [*self._known_orders, *self._control.gather_objects(list(order))]
            if self._in_first_window
            else [*self._known_orders, list(order)]
        )
        for known in orders:
            if known != orders[-1] and sorted(known) == sorted(orders[-1]):
                self._differing = orders[-1], known
        if self._in_first_window:
            self._known_orders.append(list(order))

    def _named(self, order: Order) -> list[str]:
        groups = self._optimizer.bit16_groups
        return [self._names.get(id(groups[group][index]), "?") for group, index, _ in order]
