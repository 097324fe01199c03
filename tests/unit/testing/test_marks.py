from __future__ import annotations

import os
import subprocess
import sys

from drivetrain.testing import requires_command, requires_cuda, requires_linux, requires_package


def test_marks_skip_only_what_the_machine_lacks() -> None:
    assert requires_cuda(10_000).args == (True,)
    assert requires_cuda(0).args == (False,)
    assert requires_package("torch").args == (False,)
    assert requires_package("torch", "2.11").args == (False,)
    assert requires_package("torch", "99.0").args == (True,)
    assert "torch >= 99.0" in requires_package("torch", "99.0").kwargs["reason"]
    assert requires_package("no_such_package_here").args == (True,)
    assert requires_package("no_such_package_here.part").args == (True,)
    assert requires_command("no-such-command-here").args == (True,)
    assert requires_linux().args == (sys.platform != "linux",)


def test_importing_the_helpers_does_not_import_pytest() -> None:  # H-02
    code = (
        "import sys, drivetrain.testing; assert 'pytest' not in sys.modules; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
