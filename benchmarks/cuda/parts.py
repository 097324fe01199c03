"""The parts of `make cuda` in order of importance, and their pieces, each of which runs in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 480  # seconds of one part
ALL = 1500  # seconds of all of them on one H100


@dataclass(frozen=True)
class Piece:
    """A unit of work that runs in a process of its own, so that a crash affects nothing else.

    Attributes:
        part: the part's name; ``benchmarks/cuda/<part>_part.py`` has the code.
        name: its own.
        seconds: its time limit.
        ranks: how many processes of a device each it trains on; 0: as many as there are devices.
        needs: distributions that it requires, in addition to those that all pieces need.
    """

    part: str
    name: str
    seconds: int
    ranks: int = 1
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return the name by which it is requested: ``steps/gpt``."""
        return f"{self.part}/{self.name}"


@dataclass(frozen=True)
class Part:
    """Pieces that belong together.

    Attributes:
        name: as ``PART=`` takes it.
        title: in the report.
        seconds: the part stops after this time, and continues when it is run again.
        pieces: in order.
    """

    name: str
    title: str
    seconds: int
    pieces: tuple[Piece, ...]


ZERO = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
STRATEGIES = ("ddp", "fsdp", *ZERO)


def parts(devices: int) -> list[Part]:
    """Return all parts for a machine with ``devices`` devices."""
    several = (0,) if devices > 1 else ()
    return [
        Part("tests", "Tests that need a device", 390, _tests(devices)),
        Part(
            "parity",
            "Parity on NCCL with the loop written by hand",
            270,
            tuple(
                Piece("parity", name if ranks else f"{name}-on-all", 120, ranks, _needs(name))
                for ranks in (1, *several)
                for name in (*(("single_device",) if ranks else ()), *STRATEGIES)
            ),
        ),
        Part(
            "syncs",
            "Where the host waits for the device, by CUDA's own count",
            120,
            tuple(Piece("syncs", name, 40, needs=_needs(name)) for name in ("single_device", *STRATEGIES)),
        ),
        Part(
            "steps",
            "A step over the loop written by hand",
            300,
            (
                *(Piece("steps", name, 60) for name in ("linear", "mlp", "gpt")),
                Piece("steps", "gpt-124m", 150),
                *(Piece("steps", f"gpt-124m-{name}", 90, 0, _needs(name)) for name in ("ddp", "fsdp")),
            ),
        ),
        Part(
            "memory",
            "Memory of a device over the loop written by hand",
            150,
            tuple(Piece("memory", name, 60, 0, _needs(name)) for name in ("fsdp", "fsdp-bf16", *ZERO, "ddp")),
        ),
        Part(
            "sanitizer",
            "Races between streams, by torch's sanitizer",
            90,
            tuple(Piece("sanitizer", name, 60, needs=_needs(name)) for name in ("single_device", "ddp", "fsdp")),
        ),
        Part(
            "variants",
            "fp16, fused optimizers, compile, CUDA graphs",
            180,
            tuple(Piece("variants", name, 90) for name in ("fp16", "fused", "compile", "cuda-graphs")),
        ),
    ]


def chosen(names: list[str], devices: int) -> list[Part]:
    """Return the requested parts, or single pieces such as ``steps/gpt``; all if nothing is requested.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    every = parts(devices)
    if not names:
        return every
    known = {part.name for part in every} | {piece.key for part in every for piece in part.pieces}
    for name in names:
        if name not in known:
            prefix = name.partition("/")[0]
            there = [piece.key for each in every if each.name == prefix for piece in each.pieces]
            raise ValueError(f"no part {name!r}; there are {', '.join(there or [each.name for each in every])}")
    found = []
    for part in every:
        pieces = tuple(piece for piece in part.pieces if part.name in names or piece.key in names)
        if pieces:
            found.append(Part(part.name, part.title, part.seconds, pieces))
    return found


def _needs(name: str) -> tuple[str, ...]:
    return ("deepspeed",) if name.startswith("deepspeed") else ()


def _tests(devices: int) -> tuple[Piece, ...]:
    """Return a piece for each file with tests marked ``cuda``: after an illegal access its process cannot continue."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in path.read_text()]
    return tuple(Piece("tests", path.stem.removeprefix("test_"), 150, devices) for path in files)
