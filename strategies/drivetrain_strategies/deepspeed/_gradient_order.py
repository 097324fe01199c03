"""Do gradients arise in the same order on all ranks? ZeRO 2 adds them up by their place in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import ControlPlane

Order = list[Any]
"""A bucket's parameters as DeepSpeed lists them: (group, place in the group, id)."""


class GradientOrder:
    """Compares each bucket of gradients with those of the first window, just before it is reduced.

    A rank's forward may go another way than the others', by the values or the number of its samples: BatchNorm does
    with a single one. The same parameters then get their gradients in another order, and DeepSpeed would add up what
    does not belong together. In the first window the ranks compare their orders, in a small CPU collective for each
    bucket; after that each compares its own with what it was, without a word to the others.

    Args:
        optimizer: ZeRO's, of stage 2.
        names: of the trainable parameters.
        control: the way to the other ranks.
    """

    def __init__(self, optimizer: Any, names: Mapping[nn.Parameter, str], control: ControlPlane) -> None:
        self._optimizer: Any = optimizer
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._control = control
        self._learns = True
        self._known: list[Order] = []
        self._differing: tuple[Order, Order] | None = None
        self._reduce: Any = optimizer.reduce_ipg_grads
        optimizer.reduce_ipg_grads = self._compare_and_reduce

    def after_backward(self) -> None:
        """Refuse what the backward added up wrongly, before a step is made of it. Talks to nobody.

        Raises:
            ConfigurationError: names the parameters.
        """
        if self._differing is None:
            return
        order, expected = map(self._named, self._differing)
        first = next(number for number, (one, other) in enumerate(zip(order, expected, strict=True)) if one != other)
        raise ConfigurationError(
            f"Gradients arose in two orders, within the first window or since: {order[first]!r} came where "
            f"{expected[first]!r} did.",
            "ZeRO 2 exchanges them while backward goes on, and ranks that differ in their order would add up what does "
            "not belong together. So it is where the forward depends on a rank's samples: BatchNorm is computed "
            "otherwise for a single one.",
            "set DeepSpeedStrategy(find_unused_parameters=True), with which they are exchanged in the parameters' "
            "order, or use stage 1, stage 3 or strategy='fsdp'.",
        )

    def after_step(self) -> None:
        """The first window is over."""
        self._learns = False

    def close(self) -> None:
        """Let DeepSpeed reduce by itself."""
        if self._optimizer is not None:
            self._optimizer.__dict__.pop("reduce_ipg_grads", None)
        self._optimizer = self._reduce = None  # a traceback may keep this object, and it would keep process groups

    def _compare_and_reduce(self, comm_dtype: torch.dtype | None = None) -> None:
        for dtype, bucket in self._optimizer.ipg_buckets.items():
            if comm_dtype is None or dtype == comm_dtype:
                self._compare(bucket.params)
        self._reduce(comm_dtype=comm_dtype)

    def _compare(self, order: Order) -> None:
        if not self._learns and order in self._known:
            return
        # With another order of the same ones in the first window, nobody could tell later which is the others'.
        orders = (
            [*self._known, *self._control.gather_objects(list(order))] if self._learns else [*self._known, list(order)]
        )
        for one in orders:
            if one != orders[-1] and sorted(one) == sorted(orders[-1]):
                self._differing = orders[-1], one
        if self._learns:
            self._known.append(list(order))

    def _named(self, order: Order) -> list[str]:
        groups = self._optimizer.bit16_groups
        return [self._names.get(id(groups[group][place]), "?") for group, place, _ in order]
