"""O-01, O-06: builds of torch with CUDA have the names that the emulation needs, although it cannot run there."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from emulated_cuda import building, torch_cuda

HEADERS = Path(sysconfig.get_path("include")) / "Python.h"

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="the emulation runs in this build of torch")


@pytest.mark.timeout(400)
@pytest.mark.skipif(building._compiler() is None or not HEADERS.is_file(), reason="needs a C++ compiler and Python.h")
def test_its_source_compiles() -> None:  # O-06
    compiler = building._compiler()
    assert compiler is not None
    done = subprocess.run([*building._command(compiler), "-fsyntax-only"], capture_output=True, text=True)
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if "error" in line]


def test_the_names_that_it_stands_in_for_are_there() -> None:  # O-06
    torch_cuda.check_torch_version()
    names = set(re.findall(r'"(_cuda_\w+)":', Path(torch_cuda.__file__).read_text()))
    assert len(names) > 20
    assert not {name for name in names if not hasattr(torch._C, name)}
