"""Runs one piece in this process: `python -m benchmarks.cuda.child steps gpt --result file.json`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import traceback
from pathlib import Path

from benchmarks.cuda.outcome import LACKING, write_json
from benchmarks.cuda.parts import MOST, Piece, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("piece")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    piece = next(
        piece
        for part in parts(options.devices)
        for piece in part.pieces
        if (piece.part, piece.name) == (options.part, options.piece)
    )
    if options.rehearse:
        piece = dataclasses.replace(piece, seconds=MOST)
    write_json(options.result, _measured(piece, options.devices, options.rehearse))


def _measured(piece: Piece, devices: int, rehearse: bool) -> dict[str, object]:
    lacking = [name for name in piece.needs if importlib.util.find_spec(name) is None]
    if lacking:
        return {"status": LACKING, "reason": f"{', '.join(lacking)} is not installed: `make cuda-wheels` packs it"}
    part = importlib.import_module(f"benchmarks.cuda.{piece.part}_part")
    try:
        return dict(part.measured(piece, devices, rehearse).record())
    except ModuleNotFoundError as error:
        traceback.print_exc()
        return {"status": LACKING, "reason": str(error)}
    except BaseException as error:  # SystemExit is how benchmarks refuse loops that did different work
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[-2000:]}


if __name__ == "__main__":
    main()
