"""The cost of a step in processor instructions, which other work on the machine hardly changes.

An instruction is not a unit of time, but the same loop takes the same number of them in every run, to within a few
thousandths; differences of one percent, which the clock cannot resolve, are visible. Valgrind runs a program about
fifty times slower, and as on a processor with AVX2.
"""

from __future__ import annotations

import tempfile
from functools import partial
from unittest.mock import patch

import torch.distributed as dist

from benchmarks import strategies
from benchmarks.by_hand import WRAPS
from benchmarks.bytecodes import bytecodes_a_step
from benchmarks.deepspeed_by_hand import STAGES
from benchmarks.nets import GPT
from benchmarks.peers import OURS, PEERS, versions
from benchmarks.slopes import Loop, row
from benchmarks.step import RAW, loops_of
from benchmarks.valgrind import instructions_a_step, version
from benchmarks.work import WORKS
from drivetrain.callbacks import progress_bar

NAMES = [name for name, peer in PEERS.items() if not peer.slow]
"""The frameworks that are counted: the others' additions the clock tells well enough."""
STEPS = {"linear": (100, 500), "mlp": (100, 300)}
"""By network; what is logged is brought to the host every 50 steps."""
RANK_S_STEPS = (10, 30)


def table() -> list[str]:
    """The tables' lines.

    Raises:
        SystemExit: Valgrind is not installed.
    """
    lines = [versions(), f"{version()}. Thousands of instructions.", ""]
    lines += [row("", "", "", "a step", "over raw", "ratio", "of ours"), "|---" * 7 + "|"]
    for net, steps in STEPS.items():
        counts = instructions_a_step(loops_of_a_net, steps, net)
        base = counts.pop(RAW)
        lines.append(row(net, "", RAW, _thousands(base), "", "", ""))
        for label, count in counts.items():
            way, name = label.split(": ")
            added, ours = count - base, counts[f"{way}: {OURS}"] - base
            times = f"{added / ours:.1f}" if name != OURS and ours > 0 else ""
            shown = f"**{name}**" if name == OURS else name
            lines.append(row(net, way, shown, _thousands(count), _thousands(added), f"{count / base:.4f}", times))
    lines += ["", row("a rank's step", "by hand", "engine", "over", "ratio"), "|---" * 5 + "|"]
    counts = instructions_a_step(loops_of_a_rank, RANK_S_STEPS)
    for strategy in STRATEGIES:
        hand, engine = (counts[f"{strategy}: {name}"] for name in ("by hand", "engine"))
        cells = [_thousands(hand), _thousands(engine), _thousands(engine - hand)]
        lines.append(row(f"`{strategy}`", *cells, f"{engine / hand:.4f}"))
    lines += ["", row("bytecodes of a bare step of `linear`, over raw", ""), "|---|---|"]
    return [*lines, *(row(f"`{name}`", f"{count:.0f}") for name, count in bytecodes_by_function().items())]


def bytecodes_by_function() -> dict[str, float]:
    """Return bytecodes that our bare step of the smallest network adds to the raw loop, by function and overall."""
    loops = loops_of(WORKS["linear"], [OURS])
    raw, ours = (bytecodes_a_step(loops[key]) for key in ((RAW, ""), (OURS, "bare")))
    # The loop itself is a different function in each.
    more = {name: ours.get(name, 0.0) - raw.get(name, 0.0) for name in ours | raw}
    largest = dict(sorted(more.items(), key=lambda item: -item[1]))
    return {name: count for name, count in largest.items() if abs(count) >= 1} | {"in all": sum(more.values())}


# Functions that Valgrind runs

STRATEGIES = [*WRAPS, *STAGES]


def loops_of_a_net(net: str) -> dict[str, Loop]:
    """Return the loops in one process; for larger networks only the raw loop and ours, bare and typical."""
    found: dict[str, Loop] = {}
    for (name, way), loop in loops_of(WORKS[net], NAMES if net == "linear" else [OURS]).items():
        if way == "typical" and name == OURS:
            found[f"{way}: {name}"] = partial(_with_a_still_bar, loop)
        elif way in ("", "bare") or (net == "linear" and way != "typical"):
            found[f"{way}: {name}" if way else name] = loop
    return found


def _with_a_still_bar(loop: Loop, steps: int) -> float:
    """Draw the progress bar only once: it refreshes by the clock, too often for a program slowed down by Valgrind."""
    with patch.object(progress_bar, "_now", lambda: 0.0):
        return loop(steps)


def loops_of_a_rank() -> dict[str, Loop]:
    """Return loops in a process group of one, which show a rank's work apart from waiting. The network is narrow to
    save time.
    """
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
    found = {strategy: strategies.loops_of(strategy, lambda: GPT(width=16, heads=2)) for strategy in STRATEGIES}
    return {f"{strategy}: {name}": loop for strategy, loops in found.items() for name, loop in loops.items()}


def _thousands(count: float) -> str:
    return f"{count / 1000:,.1f}"
