"""The cost of a step on a device, compared with the hand-written loop. The loops take turns."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.cuda.devices import DEVICE, devices, full_precision, on_ranks
from benchmarks.cuda.loops import Job, by_engine, by_hand, gpt, small
from benchmarks.cuda.nets import GPT_124M, TINY, flops_a_token
from benchmarks.cuda.outcome import Outcome
from benchmarks.cuda.parts import Piece
from benchmarks.slopes import Slopes, ratios, spread, time_loops
from benchmarks.turns import Turns
from drivetrain.callbacks.throughput_monitor import known_peak_flops

COLUMNS = ["Network", "loop", "ms a step", "over by hand", "processor, ms", "over by hand", "tokens/s", "MFU", "MiB"]
AGAIN = "by hand, again"
"""Tells how far apart two loops come out that are the same."""
ROUNDS, TURN, TURNS = 5, 5, 9
APART = {"32-true": 1e-3, "bf16-mixed": 5e-2}
"""How far, relatively, the weights' checksums may lie: sums of a device's atomics come in any order, and AdamW makes
much of the sign of a gradient that is nearly zero."""


def measured(piece: Piece, count: int, rehearse: bool) -> Outcome:
    name = piece.name.removeprefix("gpt-124m-")
    if name != piece.name:
        ranks = count if piece.ranks == 0 else piece.ranks
        slopes, peaks, apart, rate = on_ranks(_of_ranks, ranks, rehearse, name, rehearse, timeout=piece.seconds)[0]
        return _told(f"gpt-124m, `{name}` on {ranks}, bf16-mixed", slopes, peaks, apart, APART["bf16-mixed"], rate)
    with devices(count, rehearse):
        job, rounds = _job(piece.name, rehearse), 2 if rehearse else ROUNDS
        slopes, peaks, apart = _alone(job, rounds)
        rate = _rate(job, rehearse) if piece.name == "gpt-124m" else None
    return _told(f"{piece.name}, {job.precision}", slopes, peaks, apart, APART[job.precision], rate)


def _job(name: str, rehearse: bool, strategy: str = "single_device") -> Job:
    if name != "gpt-124m":
        return Job(small(name, rehearse))
    work = gpt(TINY, 2, 4) if rehearse else gpt()
    return Job(work, "bf16-mixed", strategy)


def _alone(job: Job, rounds: int) -> tuple[dict[str, Slopes], dict[str, float], float]:
    full_precision()
    loops = {"by hand": partial(by_hand, job), "engine": partial(by_engine, job), AGAIN: partial(by_hand, job)}
    # The first run of each is not timed, because it includes start-up.
    peaks = {name: _peak(partial(loop, job.work.short)) for name, loop in loops.items()}
    seen: list[float] = []
    slopes = time_loops(loops, job.work.short, job.work.long, rounds, compare=partial(_compare, seen))
    return slopes, peaks, max(seen)


def _peak(run: Callable[[], float]) -> float:
    """Return the peak device memory of the run, in MiB."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / 2**20


def _compare(seen: list[float], steps: int, sums: dict[str, float]) -> None:
    """Record the relative difference between the weights' checksums."""
    base = sums["by hand"]
    seen.append(max(abs(value - base) for value in sums.values()) / max(abs(base), 1e-9))


def _rate(job: Job, rehearse: bool) -> tuple[int, float | None]:
    """Return the tokens of a step, and the share of the device's peak at one token per second."""
    shape = TINY if rehearse else GPT_124M
    peak = known_peak_flops(torch.device(DEVICE), torch.bfloat16)
    share = None if peak is None else flops_a_token(job.work.net(), shape) / peak
    return shape.batch * shape.length, share


def _of_ranks(strategy: str, rehearse: bool) -> tuple[Any, ...]:
    """Runs on one rank: loops side by side that take turns within one run."""
    job = _job("gpt-124m", rehearse, strategy)
    turn, number = (1, 2) if rehearse else (TURN, TURNS)
    turns = Turns(turn, job.work.batch, settle=torch.cuda.synchronize)
    steps = turn * (number + 2)
    device = torch.cuda.current_device()

    def on_device(loop: Callable[..., float]) -> float:
        torch.cuda.set_device(device)  # a new thread starts with device 0
        return loop(job, steps, turns.data)

    loops = {name: partial(on_device, loop) for name, loop in _LOOPS.items()}
    peaks = {name: _peak(partial(loop, job, 2)) for name, loop in _LOOPS.items()}
    seen: list[float] = []
    slopes = turns.run(loops, compare=partial(_compare, seen))
    return slopes, peaks, max(seen), _rate(job, rehearse)


_LOOPS = {"by hand": by_hand, "engine": by_engine, AGAIN: by_hand}


def _told(
    title: str,
    slopes: dict[str, Slopes],
    peaks: dict[str, float],
    apart: float,
    may_be: float,
    rate: tuple[int, float | None] | None = None,
) -> Outcome:
    near = "equal to the last bit" if apart == 0 else f"within {apart:.1e} of each other"
    outcome = Outcome(COLUMNS, notes=[f"the loops' weights are {near}"])
    if not apart <= may_be:
        outcome.failures.append(f"the loops did different work: their weights' checksums lie {apart:.1e} apart")
    base = slopes["by hand"]
    for name, its in slopes.items():
        row = [title, name]
        for values, others in ((its.wall, base.wall), (its.busy, base.busy)):
            row.append(spread([1e3 * value for value in values], 3))
            row.append("" if its is base else spread(ratios(values, others), 3))
        speed = share = None
        if rate is not None:
            speed = rate[0] / statistics.median(its.wall)
            share = None if rate[1] is None else speed * rate[1]
        row += ["" if speed is None else f"{speed:,.0f}", "" if share is None else f"{share:.1%}"]
        row.append(f"{peaks[name]:,.1f}")
        outcome.rows.append(row)
        outcome.figures[f"{title}: {name}"] = {
            "wall_s": its.wall,
            "busy_s": its.busy,
            "tokens_a_second": speed,
            "mfu": share,
            "peak_mib": peaks[name],
        }
    return outcome
