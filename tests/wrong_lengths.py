"""Data whose length is wrong."""

from __future__ import annotations

from collections.abc import Iterator


class Batches:
    def __init__(self, samples: int, said: int) -> None:
        self.samples, self.said = samples, said

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[index, index + 1] for index in range(0, self.samples, 2)])
