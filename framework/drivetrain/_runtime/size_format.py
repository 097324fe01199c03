"""Sizes of what is in memory or on a disk, in words."""

from __future__ import annotations


def size_in_words(nbytes: float, form: str = ".1f", least: str = "bytes") -> str:
    """Say a number of bytes in the largest unit of which there is one: ``"592 bytes"``, ``"1.2 KiB"``.

    Args:
        nbytes: how many.
        form: of a number of larger units.
        least: what bytes are called.
    """
    if nbytes < 1024:
        return f"{nbytes:.0f} {least}"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:{form}} {unit}"
    return f"{nbytes / 1024:{form}} TiB"
