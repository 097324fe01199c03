"""The order of samples in an epoch: a keyed permutation, evaluated where it is asked for."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from drivetrain._runtime.seed import derive_seed

_TABLE_LIMIT = 2**16
_ROUNDS = 6

# The constants of splitmix64 (Steele, Lea, Flood 2014), written as the signed integers torch computes with.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


class Order(Protocol):
    """Which sample stands at which position of an epoch: a bijection of ``range(len(order))``."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> int: ...

    def __call__(self, positions: Tensor) -> Tensor:
        """Map int64 positions of any shape to sample indices of the same shape."""
        ...


class SequentialOrder:
    """The order of the data set itself."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> int:
        return _checked(position, self._length)

    def __call__(self, positions: Tensor) -> Tensor:
        return positions


class KeyedPermutation:
    """A shuffled order that is a pure function of ``(length, seed, epoch)``.

    Nothing is stored that grows with the length: up to 65,536 samples the permutation is the order of their hashed
    positions, kept as a table; above that it is a Feistel network with cycle walking, so that a billion samples
    start at once and any position can be asked for first.

    References:
        Black and Rogaway, *Ciphers with arbitrary finite domains*, CT-RSA 2002.

    Args:
        length: how many samples there are.
        seed: the seed of the run.
        epoch: every epoch has an order of its own.
    """

    __slots__ = ("_keys", "_length", "_side", "_table")

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self._length = length
        self._keys = [derive_seed(length, seed, epoch, round_) for round_ in range(_ROUNDS)]
        # Positions are taken as two digits to this base. The square is at most 2 * sqrt(length) + 1 larger than the
        # length, so that next to no position has to walk.
        self._side = math.isqrt(max(length - 1, 0)) + 1
        self._table: Tensor | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> int:
        index = self(torch.tensor([_checked(position, self._length)], dtype=torch.int64, device="cpu"))
        return int(index.item())

    def __call__(self, positions: Tensor) -> Tensor:
        """Map int64 positions of any shape, each in ``range(len(self))``, to sample indices of the same shape."""
        if self._length > _TABLE_LIMIT:
            return self._walk(positions)
        if self._table is None:
            every = torch.arange(self._length, dtype=torch.int64, device="cpu")
            # Two keyed rounds: the hash of one is a bijection of 64 bits, so there are no ties to break.
            self._table = _scramble(_scramble(every, self._keys[0]), self._keys[1]).argsort()
        return self._table[positions]

    def _walk(self, positions: Tensor) -> Tensor:
        found = self._encrypt(positions)
        outside = found >= self._length
        # The network permutes side**2 numbers. Following it from a number outside until it comes back inside
        # leaves a permutation of the numbers inside.
        while bool(outside.any()):
            found[outside] = self._encrypt(found[outside])
            outside = found >= self._length
        return found

    def _encrypt(self, positions: Tensor) -> Tensor:
        left, right = positions // self._side, positions % self._side
        for key in self._keys:
            # The shift drops the sign, which `%` would otherwise have to turn.
            mixed = _shifted(_scramble(right, key), 1)
            left, right = right, (left + mixed % self._side) % self._side
        return left * self._side + right


def order(length: int, seed: int, epoch: int) -> KeyedPermutation:
    """Return the shuffled order of ``length`` samples in ``epoch``, the same on every rank and at every world size."""
    return KeyedPermutation(length, seed, epoch)


def _scramble(numbers: Tensor, key: int) -> Tensor:
    """Hash each int64 number under ``key``: splitmix64's output function, a bijection of 64 bits."""
    mixed = numbers * _INCREMENT + key
    mixed = (mixed ^ _shifted(mixed, 30)) * _MULTIPLIER_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MULTIPLIER_2
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift right without the sign, which torch's own shift carries along."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _checked(position: int, length: int) -> int:
    if not 0 <= position < length:
        raise IndexError(f"position {position} is outside an order of {length} samples")
    return position
