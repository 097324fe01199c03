"""Seeds: one call for every generator of the process, and new seeds derived from several numbers."""

from __future__ import annotations

import hashlib
import operator
import random

import torch

from drivetrain._runtime.optional_packages import is_installed
from drivetrain.errors import ConfigurationError

_last_seed: int | None = None
_seed_at_import: int = torch.initial_seed()
_state_at_import: torch.Tensor = torch.get_rng_state()


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed the generators of Python, NumPy (where it is installed) and torch, on every device.

    A `Fit` without a seed of its own takes this one for the order of its samples.

    Args:
        seed: from 0 to 2**32 - 1, the range NumPy accepts.
        workers: taken for Lightning's sake; a run seeds its data-loading workers whatever it says.

    Returns:
        The seed.

    Raises:
        ConfigurationError: the seed is not an integer, or out of range.
    """
    global _last_seed
    _last_seed = checked_seed(seed)
    seed_generators(_last_seed)
    return _last_seed


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy (where it is installed) and torch with a seed of any size."""
    random.seed(seed)
    if is_installed("numpy"):
        import numpy

        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def last_seed() -> int | None:
    """Return the seed of the latest `seed_everything` in this process, or None."""
    return _last_seed


def never_seeded() -> bool:
    """Tell whether nobody has seeded torch in this process, as far as the seed of its generator tells.

    Unseeded, it has a random one of up to 64 bits. People choose smaller ones, and what they choose after this module
    was imported is another one than that.
    """
    seed = torch.initial_seed()
    return _last_seed is None and seed == _seed_at_import and seed >= 2**32


def drawn_from() -> bool:
    """Tell whether torch's generator stands elsewhere than when this module was imported.

    What was drawn within `torch.random.fork_rng`, where people seed it, leaves it where it was.
    """
    return not torch.equal(torch.get_rng_state(), _state_at_import)


def checked_seed(seed: object) -> int:
    """Return ``seed`` as an int.

    Raises:
        ConfigurationError: it is not an integer from 0 to 2**32 - 1.
    """
    try:
        value = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        value = -1
    if isinstance(seed, bool) or not 0 <= value < 2**32:
        raise ConfigurationError(
            f"seed={seed!r} is not a seed",
            "NumPy's generator takes integers from 0 to 2**32 - 1 and nothing else, and all generators get the same",
            f"pass an integer, for example seed={value % 2**32 if value > 0 else 42}",
        )
    return value


def derive_seed(*parts: int) -> int:
    """Return a seed that is a pure function of ``parts``: the same in every process, on every machine.

    Different parts, or the same in another order or number, give unrelated seeds; this is why the seed for
    (seed, epoch, rank) is derived rather than added up, where (0, 1) and (1, 0) would meet.

    Args:
        parts: integers of any size and sign.

    Returns:
        An integer from 0 to 2**63 - 1, which `torch.Generator.manual_seed` accepts.
    """
    # Text keeps the boundaries between the parts and knows no width, so that no two tuples look alike.
    text = ",".join(str(operator.index(part)) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"drivetrain").digest()
    return int.from_bytes(digest, "little") >> 1
