"""`make cuda-wheels`: packs what a machine with torch, but without a network, lacks for `make cuda`; never torch."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.cuda.packages import ALWAYS, FOR_DEEPSPEED, ROOT, WHEELS

PYTHONS = ("3.11", "3.12")
LARGEST = 60_000_000  # bytes that an archive may have
BUILT = ("deepspeed",)  # published only as source; without its operators it is pure Python
GLIBC = (28, 27, 26, 24, 17, 12, 5)
"""Of manylinux: what machines with torch 2.11 have, and older."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", nargs="*", default=PYTHONS, help="for these versions; default: %(default)s")
    options = parser.parse_args()
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir()
    names = [each.name for each in (*ALWAYS, *FOR_DEEPSPEED)]
    pins = _pins()
    for name in names:
        if name in BUILT:
            _build(pins[name])
        else:
            for python in options.pythons:
                _download(pins[name], python)
        print(f"  {name}", flush=True)
    archive = WHEELS.with_suffix(".tar")
    with tarfile.open(archive, "w") as tar:  # wheels are already compressed
        tar.add(WHEELS, WHEELS.name)
    size = archive.stat().st_size
    wheels = sorted(WHEELS.glob("*.whl"))
    forbidden = [path.name for path in wheels if re.match(r"(torch|nvidia|triton)-", path.name)]
    if forbidden or size > LARGEST:
        raise SystemExit(
            f"{archive.name} has {size / 1e6:.1f} MB, at most 60 are wanted; {forbidden} have no place in it."
        )
    print(
        f"{archive.name}: {len(wheels)} wheels, {size / 1e6:.1f} MB, for Python {', '.join(options.pythons)} on Linux "
        "x86_64. Bring it to the root of the repository on the machine with the GPU, and run `make cuda` there."
    )


def _download(requirement: str, python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, "--abi", "abi3"]
    command += ["--abi", f"cp{python.replace('.', '')}", "--abi", "none"]
    for number in GLIBC:
        command += ["--platform", f"manylinux_2_{number}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    _run([*command, "-d", str(WHEELS), requirement])


def _build(requirement: str) -> None:
    """Build from source in an isolated environment: its build requirements are not packed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "-qq", "--disable-pip-version-check", "--no-deps"]
        _run([*command, "--no-build-isolation", "-w", folder, requirement])
        (wheel,) = Path(folder).glob("*.whl")
        if not wheel.name.endswith("-py3-none-any.whl"):
            raise SystemExit(f"{wheel.name} is for this machine alone, though DS_BUILD_OPS=0 was said.")
        shutil.copy(wheel, WHEELS)


def _run(command: list[str]) -> None:
    variables = {**os.environ, "DS_BUILD_OPS": "0", "PIP_NO_INPUT": "1"}
    for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):
        variables.pop(name, None)
    subprocess.run(command, env=variables, check=True)


def _pins() -> dict[str, str]:
    """Return the pins by plain name, as `name==version`; unpinned packages are left unpinned."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if version:
            found[re.sub(r"[-_.]+", "-", name).lower()] = f"{name}=={version}"
    return found


if __name__ == "__main__":
    main()
