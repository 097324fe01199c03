"""The order of samples in an epoch, as a keyed permutation that is evaluated only at the requested positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from drivetrain._runtime.seed import derive_seed

_MAX_TABLE = 2**16  # maximum number of samples for which the permutation is stored as a table
_ROUNDS = 6  # number of rounds of the Feistel network

# The constants of splitmix64 (Steele, Lea, Flood 2014), as signed integers, which torch computes with.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


Order = Callable[[Tensor], Tensor]
"""Maps int64 positions of an epoch, in a tensor of any shape, to sample indices: a bijection of ``range(length)``."""


def in_sequence(positions: Tensor) -> Tensor:
    """The order of the data set, without shuffling."""
    return positions


class KeyedPermutation:
    """A shuffled order that is a pure function of ``(length, seed, epoch)``.

    Memory is bounded: up to 65,536 samples, the permutation is a table of the positions sorted by their hashes. Above
    that, it is a Feistel network with cycle walking, which computes any position of a billion samples directly.

    References:
        Black and Rogaway, *Ciphers with arbitrary finite domains*, CT-RSA 2002.

    Args:
        length: the number of samples.
        seed: the seed of the run.
        epoch: the epoch's number; every epoch has a different order.
    """

    __slots__ = ("_keys", "_length", "_side", "_table")

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self._length = length
        self._keys = [derive_seed(length, seed, epoch, round_) for round_ in range(_ROUNDS)]
        # A position is written as two digits in base `_side`. The square of the base exceeds the length by at most
        # 2 * sqrt(length) + 1, so cycle walking is rarely needed.
        self._side = math.isqrt(max(length - 1, 0)) + 1
        self._table: Tensor | None = None

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._length:
            raise IndexError(f"position {position} is outside an order of {self._length} samples")
        return int(self(torch.tensor([position], dtype=torch.int64, device="cpu")).item())

    def __call__(self, positions: Tensor) -> Tensor:
        """Map int64 positions of any shape, each in ``range(length)``, to sample indices of the same shape."""
        if self._length > _MAX_TABLE:
            return self._walk(positions)
        if self._table is None:
            all_positions = torch.arange(self._length, dtype=torch.int64, device="cpu")
            # The positions are hashed twice. Each hash is a bijection of 64-bit numbers, so there are no ties.
            self._table = _scramble(_scramble(all_positions, self._keys[0]), self._keys[1]).argsort()
        return self._table[positions]

    def _walk(self, positions: Tensor) -> Tensor:
        indices = self._encrypt(positions)
        outside = indices >= self._length
        # The network permutes side**2 numbers. Applying it repeatedly until a number is inside the range yields a
        # permutation of the range.
        while bool(outside.any()):
            indices[outside] = self._encrypt(indices[outside])
            outside = indices >= self._length
        return indices

    def _encrypt(self, positions: Tensor) -> Tensor:
        left, right = positions // self._side, positions % self._side
        for key in self._keys:
            # The shift clears the sign bit, so that `%` sees no negative numbers.
            mixed = _logical_shift(_scramble(right, key), 1)
            left, right = right, (left + mixed % self._side) % self._side
        return left * self._side + right


def order(length: int, seed: int, epoch: int) -> KeyedPermutation:
    """Return the shuffled order of ``length`` samples in ``epoch``, the same on every rank and at every world size."""
    return KeyedPermutation(length, seed, epoch)


def _scramble(numbers: Tensor, key: int) -> Tensor:
    """Hash each int64 number with ``key`` by splitmix64's output function, a bijection of 64-bit numbers."""
    mixed = numbers * _INCREMENT + key
    mixed = (mixed ^ _logical_shift(mixed, 30)) * _MULTIPLIER_1
    mixed = (mixed ^ _logical_shift(mixed, 27)) * _MULTIPLIER_2
    return mixed ^ _logical_shift(mixed, 31)


def _logical_shift(numbers: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, because torch's ``>>`` fills with the sign bit."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
