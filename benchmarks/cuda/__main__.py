"""`make cuda`: run the parts that need a GPU, one by one, and write one report of everything run so far.

Finished pieces are not run again, so an interrupted run continues where it stopped. `--fresh` runs everything again,
`--fresh failed` only what failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cuda import machine, packages, report
from benchmarks.cuda.outcome import ENDED, LACKING, NOT_SHOWN, OK, write_json
from benchmarks.cuda.parts import ALL, MOST, ROOT, Part, Piece, chosen, parts
from benchmarks.cuda.processes import run

REHEARSED_DEVICES = 2
_LEAST = 5.0  # seconds; with less time left no piece can finish


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(part.name for part in parts(1))}, or as steps/gpt")
    parser.add_argument("--fresh", nargs="?", const="all", choices=["all", "failed"], help="run again what was run")
    parser.add_argument("--rehearse", action="store_true", help="on emulated devices, each step cut to seconds")
    parser.add_argument("--folder", type=Path, help="of the report; default: cuda-report")
    parser.add_argument("--limit", type=float, default=MOST, help="seconds of a part, at most; default: %(default)s")
    parser.add_argument("--wheels", help="a folder of wheels, or its archive; default: cuda-wheels or cuda-wheels.tar")
    parser.add_argument("--write", action="store_true", help="put the report into docs/benchmarks/gpu.md")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = (options.folder or ROOT / ("cuda-rehearsal" if options.rehearse else "cuda-report")).resolve()
    found = _machine(options.rehearse)
    if found["lacks"]:
        return _refuse(_no_device(found))
    try:
        brought = [] if options.rehearse else packages.provide(options.wheels)
    except RuntimeError as error:
        return _refuse(str(error))
    if brought:
        print("\n".join(brought), flush=True)
        found = _machine(options.rehearse)
    try:
        asked = chosen(options.parts, len(found["devices"]))
    except ValueError as error:
        return _refuse(str(error))
    given = " ".join(shlex.quote(one) for one in arguments)
    about = {**found, "commit": machine.commit(ROOT), "command": f"python -m benchmarks.cuda {given}".strip()}
    print(report.conditions(about), flush=True)
    try:
        for part in asked:
            _run_part(part, folder, about, options)
    except KeyboardInterrupt:
        print("Stopped: the same command goes on from here.", flush=True)
        return 130
    finally:
        whole = report.write(folder, about, len(found["devices"]))
        print(f"The report is in {folder / report.PAGE}, and as JSON beside it.", flush=True)
    if options.write:
        if options.rehearse:
            return _refuse("A rehearsal has no place in docs/benchmarks/gpu.md.")
        report.put_into_docs(whole)
    return 1 if any(one["status"] not in {OK, NOT_SHOWN, LACKING} for one in _of(asked, folder)) else 0


def _run_part(part: Part, folder: Path, about: dict[str, Any], options: argparse.Namespace) -> None:
    """Run the remaining pieces of a part until its time limit."""
    until = time.monotonic() + min(options.limit, MOST if options.rehearse else part.seconds)
    print(f"{part.name}: {part.title}, {len(part.pieces)} pieces, {until - time.monotonic():.0f} s at most", flush=True)
    for number, piece in enumerate(part.pieces, 1):
        path = report.path_of(folder, piece)
        before = report.known(path)
        label = f"  {number}/{len(part.pieces)} {piece.key}"
        if before and _stands(before, about, options.fresh):
            print(f"{label}: {before['status']}, as it was run before", flush=True)
            continue
        left = until - time.monotonic()
        if left < _LEAST:
            print(f"{label}: not begun, the part's time is over; the same command goes on with it", flush=True)
            continue
        print(f"{label} ...", flush=True)
        # A rehearsal may run on a slow machine, so it has no time limit.
        record = _run_piece(piece, path, left if options.rehearse else min(piece.seconds, left), about, options)
        write_json(path, record)
        reason = record.get("reason", "").strip().splitlines()
        print(
            f"    {record['status']} after {record['seconds']:.1f} s{f': {reason[-1]}' if reason else ''}", flush=True
        )


def _run_piece(
    piece: Piece, path: Path, seconds: float, about: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    result = path.with_suffix(".result.json")
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.cuda.child", piece.part, piece.name, "--result", str(result)]
    command += ["--devices", str(len(about["devices"])), *(["--rehearse"] if options.rehearse else [])]
    variables = {"PYTHONPATH": packages.python_path(), "OMP_NUM_THREADS": "1" if options.rehearse else "4"}
    if piece.part == "sanitizer" and not options.rehearse:
        variables["TORCH_CUDA_SANITIZER"] = "1"
    log = folder_of_logs(path) / f"{piece.part}-{piece.name}.log"
    ended = run(command, seconds, log, variables, piece.key)
    record: dict[str, Any] = {"part": piece.part, "name": piece.name, **(report.known(result) or {})}
    result.unlink(missing_ok=True)
    if "status" not in record:
        record["status"] = "out of time" if ended.code is None else "crashed"
        record["reason"] = f"{ended.tail}\n{ended.how}".strip()
    kept = ("commit", "command", "torch", "cuda", "nccl", "python", "driver", "devices", "rehearsed")
    record |= {name: about.get(name) for name in kept}
    record |= {"seconds": round(ended.seconds, 1), "date": _now(), "log": log.name}
    return record


def folder_of_logs(path: Path) -> Path:
    return path.parents[1] / "logs"


def _stands(before: dict[str, Any], about: dict[str, Any], fresh: str | None) -> bool:
    """Return whether an earlier result is still valid: it had the same torch on the same devices."""
    if fresh == "all" or (fresh == "failed" and before["status"] not in (OK, NOT_SHOWN)):
        return False
    return before["status"] in ENDED and all(before.get(name) == about.get(name) for name in ("torch", "devices"))


def _of(asked: list[Part], folder: Path) -> list[dict[str, Any]]:
    records = [report.known(report.path_of(folder, piece)) for part in asked for piece in part.pieces]
    return [{"status": "not begun"} if record is None else record for record in records]


def _machine(rehearse: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cuda.machine", *([str(REHEARSED_DEVICES)] if rehearse else [])]
    variables = {**os.environ, "PYTHONPATH": packages.python_path()}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        version = ".".join(map(str, sys.version_info[:3]))
        return {"lacks": f"torch ended badly: {done.stderr[-1500:]}", "python": version, "executable": sys.executable}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _no_device(found: dict[str, Any]) -> str:
    visible = found.get("visible")
    lines = [
        "There is no GPU that can be used here.",
        f"Looked for: a CUDA device, with {found['executable']} (Python {found['python']}): {found['lacks']}.",
    ]
    if visible is not None:
        lines.append(f"CUDA_VISIBLE_DEVICES is {visible!r}.")
    lines += [
        "With a GPU: name a Python whose torch (2.11 or newer) is built for CUDA, `make cuda PYTHON=/path/to/python`.",
        "Without one: `make cuda REHEARSE=1` runs every part in seconds on emulated devices.",
    ]
    return "\n".join(lines)


def _refuse(text: str) -> int:
    print(f"make cuda: {text}", file=sys.stderr, flush=True)
    return 2


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


assert sum(part.seconds for part in parts(1)) <= ALL

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
