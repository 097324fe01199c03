"""A pytest plugin that provides emulated devices to tests that need one, here and (tests/worlds.py) on ranks."""

from __future__ import annotations

import contextlib
import os

import pytest

from benchmarks.cuda.devices import devices

_stack = contextlib.ExitStack()


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    _stack.enter_context(devices(int(os.environ["REHEARSED_DEVICES"]), rehearse=True))


def pytest_unconfigure() -> None:
    _stack.close()
