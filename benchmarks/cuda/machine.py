"""Describes the machine: `python -m benchmarks.cuda.machine` prints it as JSON. Runs in a process of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_FLOOR = re.search(r'"torch>=(\d+)\.(\d+)', (Path(__file__).parents[2] / "pyproject.toml").read_text())
assert _FLOOR is not None
OLDEST = tuple(map(int, _FLOOR.groups()))  # of torch
PACKAGES = ("deepspeed", "numpy", "triton", "torchmetrics", "safetensors", "fsspec", "lightning-utilities", "pytest")


def described(rehearsed_devices: int = 0) -> dict[str, Any]:
    """Return device, driver and versions. ``lacks`` says in a few words why nothing can run here, or is None."""
    found: dict[str, Any] = {
        "lacks": None,
        "devices": [],
        "python": platform.python_version(),
        "executable": sys.executable,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "rehearsed": bool(rehearsed_devices),
    }
    try:
        import torch
    except ImportError as error:
        return {**found, "lacks": f"this Python cannot import torch ({error})"}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return {**found, "lacks": f"its torch is {torch.__version__}, older than {oldest}"}
    if rehearsed_devices:
        found["devices"] = [{"name": "Emulated H100", "memory": 80 << 30}] * rehearsed_devices
        return found
    if torch.version.cuda is None:
        return {**found, "lacks": f"its torch {torch.__version__} is built without CUDA"}
    try:
        count = torch.cuda.device_count()
        for index in range(count):
            properties = torch.cuda.get_device_properties(index)
            found["devices"].append({"name": properties.name, "memory": properties.total_memory})
        torch.ones(1, device="cuda") if count else None
    except Exception as error:
        return {**found, "lacks": f"its torch {torch.__version__} cannot use the device: {error}"}
    if not count:
        return {**found, "lacks": f"its torch {torch.__version__} for CUDA {torch.version.cuda} sees no device"}
    found["driver"] = _driver()
    found["nccl"] = _said(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    found["cudnn"] = _said(torch.backends.cudnn.version)
    return found


def commit(root: Path) -> str:
    """Return the commit of the working tree, with a mark if files differ from it."""
    try:
        name = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        known = Path("/proc/driver/nvidia/version")
        text = re.search(r"Module\S*\s+(?:for \S+\s+)?([\d.]+)", known.read_text()) if known.exists() else None
        return text[1] if text else None


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", known.read_text()) if known.exists() else None
    return found[1] if found else platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said(ask: Any) -> str | None:
    try:
        return str(ask())
    except Exception:
        return None


if __name__ == "__main__":
    print(json.dumps(described(int(sys.argv[1]) if len(sys.argv) > 1 else 0)))
