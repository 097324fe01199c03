"""Seeds the generators of the process, and derives seeds from several numbers."""

from __future__ import annotations

import hashlib
import operator
import random
import sys

import torch

from drivetrain._runtime.lazy_names import is_installed
from drivetrain.errors import ConfigurationError

_last_seed: int | None = None
_seed_at_import: int = torch.initial_seed()
_state_at_import: torch.Tensor = torch.get_rng_state()


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed the generators of Python, NumPy (if it is installed) and torch on every device.

    A `Fit` without a seed uses this seed for the order of its samples.

    Args:
        seed: an integer from 0 to 2**32 - 1, the range that NumPy accepts.
        workers: has no effect, and exists for compatibility with Lightning. A run always seeds its DataLoader workers.

    Returns:
        The seed.

    Raises:
        ConfigurationError: the seed is not an integer, or is out of range.
    """
    global _last_seed
    _last_seed = validate_seed(seed)
    seed_generators(_last_seed)
    return _last_seed


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy (if it is installed) and torch with a seed of any size."""
    random.seed(seed)
    if is_installed("numpy"):
        import numpy

        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_generators_of(device: torch.device, seed: int) -> None:
    """Seed the generators of Python, torch, ``device`` (CUDA, MPS), and NumPy if it is imported.

    `torch.manual_seed` also seeds accelerators that are not initialised. It formats the stack for each kind of them,
    which takes longer than a small step.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def last_seed() -> int | None:
    """Return the seed of the latest `seed_everything` in this process, or None."""
    return _last_seed


def is_unseeded() -> bool:
    """Return True if torch still appears to have the random seed that it started with.

    The random seed has up to 64 bits. A seed below 2**32, or a seed that was set after this module was imported, is
    assumed to be set by the user.
    """
    seed = torch.initial_seed()
    return _last_seed is None and seed == _seed_at_import and seed >= 2**32


def generator_was_used() -> bool:
    """Return True if torch's CPU generator has another state than when this module was imported.

    Draws within `torch.random.fork_rng` do not count.
    """
    return not torch.equal(torch.get_rng_state(), _state_at_import)


def validate_seed(seed: object) -> int:
    """Return ``seed`` as an int.

    Raises:
        ConfigurationError: ``seed`` is not an integer from 0 to 2**32 - 1.
    """
    try:
        value = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        value = -1
    if isinstance(seed, bool) or not 0 <= value < 2**32:
        raise ConfigurationError(
            f"seed={seed!r} is not a seed",
            "NumPy's generator only takes integers from 0 to 2**32 - 1, and all generators get the same seed",
            f"pass an integer, for example seed={value % 2**32 if value > 0 else 42}",
        )
    return value


def derive_seed(*parts: int) -> int:
    """Return a seed that depends only on ``parts``, so it is equal in every process and on every machine.

    Different parts, or another order or number of parts, give unrelated seeds. A sum of the parts would instead give
    the same seed for the parts (0, 1) and (1, 0).

    Args:
        parts: integers of any size and sign.

    Returns:
        An integer from 0 to 2**63 - 1, which `torch.Generator.manual_seed` accepts.
    """
    # The separators keep the boundaries between the parts, so that different tuples give different texts.
    text = ",".join(str(operator.index(part)) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"drivetrain").digest()
    return int.from_bytes(digest, "little") >> 1
