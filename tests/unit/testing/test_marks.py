from __future__ import annotations

import sys
from typing import Any

import pytest

from drivetrain.testing import requires_command, requires_cuda, requires_linux, requires_package


@pytest.mark.parametrize(
    ("mark", "skips"),
    [
        (requires_cuda(10_000), True),
        (requires_cuda(0), False),
        (requires_package("torch", "2.11"), False),
        (requires_package("torch", "99.0"), True),
        (requires_package("no_such_package_here.part"), True),
        (requires_command("no-such-command-here"), True),
        (requires_linux(), sys.platform != "linux"),
    ],
)
def test_marks_skip_only_what_the_machine_lacks(mark: Any, skips: bool) -> None:
    assert mark.args == (skips,)
