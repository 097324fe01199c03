"""The random generators of a process as values that a checkpoint can hold."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return where the generators stand: Python's, torch's, on CUDA and MPS ``device``'s, NumPy's where it is imported.

    Numbers, strings and tensors only: all that is needed to draw the same again, and no object to unpickle.
    """
    return noted_generators(device)()


def noted_generators(device: torch.device) -> Callable[[], dict[str, Any]]:
    """Take note of where the generators stand, and return what gives that as `generator_states` does, if it is wanted.

    It costs a third of `generator_states`: some 35 microseconds.
    """
    python, host, numpy = random.getstate(), torch.get_rng_state(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    own = _state_of(device)
    return lambda: _as_values(python, host, arrays, own, device.type)


def _state_of(device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def _as_values(python: Any, host: torch.Tensor, arrays: Any, own: torch.Tensor | None, device: str) -> dict[str, Any]:
    version, words, gauss = python
    states: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": host,
    }
    if arrays is not None:
        kind, keys, position, has_gauss, cached = arrays
        states["numpy"] = {
            "kind": kind,
            "words": torch.from_numpy(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        }
    if own is not None:
        states[device] = own
    return states


def set_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators where `generator_states` found them; those that were not there then are left alone."""
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        # Imported where it is not yet: what draws from it later must find it where it stood.
        import numpy

        saved = states["numpy"]
        words = saved["words"].numpy().astype("uint32")
        numpy.random.set_state((saved["kind"], words, saved["position"], saved["has_gauss"], saved["gauss"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "mps" in states and device.type == "mps":
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def kept_generators(device: torch.device, own: Iterable[Any] = ()) -> Iterator[dict[str, Any]]:
    """Put the generators back afterwards: what is drawn within it changes nothing for who draws later.

    It gives what `generator_states` found.

    Args:
        device: whose generator counts besides the host's.
        own: generators of the user's own, which are put back too: torch's, NumPy's and Python's.
    """
    states, put_back = generator_states(device), [_put_back(one) for one in own]
    try:
        yield states
    finally:
        set_generators(states, device)
        for call in put_back:
            call()


def is_generator(value: Any) -> bool:
    """Tell whether ``value`` is a generator of random numbers whose state can be read and set."""
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def _put_back(generator: Any) -> Callable[[], object]:
    """Return what puts a generator where it stands now."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    bits = getattr(generator, "bit_generator", None)
    if bits is None:  # NumPy's older kind
        return partial(generator.set_state, generator.get_state())
    return partial(setattr, bits, "state", bits.state)
