"""Runs I/O in several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def map_in_threads(work: Callable[[Any], Any], items: Iterable[Any], threads: int) -> list[Any]:
    """Return ``[work(item) for item in items]``, computed in up to ``threads`` threads."""
    items = list(items)
    threads = min(threads, len(items))
    if threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, "checkpoint-read") as pool:
        return list(pool.map(work, items))
