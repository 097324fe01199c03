"""Formats sizes in bytes."""

from __future__ import annotations


def format_size(nbytes: float, form: str = ".1f") -> str:
    """Format a number of bytes in the largest unit that fits: ``"592 bytes"``, ``"1.2 KiB"``.

    Args:
        nbytes: the number of bytes.
        form: the format of numbers in larger units.
    """
    if nbytes < 1024:
        return f"{nbytes:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:{form}} {unit}"
    return f"{nbytes / 1024:{form}} TiB"
