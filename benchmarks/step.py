"""The cost of a step in one process, compared with the hand-written loop, for drivetrain and other frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.calls import python_calls_a_step
from benchmarks.peers import OURS, PEERS, installed, versions
from benchmarks.slopes import Loop, Slopes, over, ratios, row, spread, time_loops
from benchmarks.work import WAYS, WORKS, Work, raw

RAW = "raw loop"
SLOW = {name for name, peer in PEERS.items() if peer.slow}
Key = tuple[str, str]
"""A loop's name, and its way; the raw loop has none."""

TARGETS = [
    ("a bare step of `linear`, over raw", "linear", "bare", 1.10),
    ("a bare step of `mlp`, over raw", "mlp", "bare", 1.03),
    ("a bare step of `gpt`, over raw", "gpt", "bare", 1.03),
    ("a typical step of `mlp`, over raw", "mlp", "typical", 1.10),
]
"""What the row is called, which network and way, and the ratio to the raw loop that is aimed at."""
TIMES_AS_OFTEN = 3
"""What is aimed at is a few parts in a hundred: its loops are run among themselves, each near the raw one."""


def loops_of(work: Work, names: Sequence[str] | None = None) -> dict[Key, Loop]:
    """Return all loops that do this work, or the named ones and the raw one."""
    frameworks = {name: train for name, train in installed().items() if names is None or name in names}
    found: dict[Key, Loop] = {(RAW, ""): partial(raw, work)}
    # Ours come right after the raw loop, because their difference is a few percent.
    found |= {(name, way.name): partial(train, work, way) for name, train in frameworks.items() for way in WAYS}
    return found


def table(rounds: int, nets: Sequence[str] | None = None, names: Sequence[str] | None = None) -> list[str]:
    """The tables' lines; one thread.

    Args:
        rounds: how often each loop is run.
        nets: which networks; None for all.
        names: which frameworks; None for all that are installed.
    """
    torch.set_num_threads(1)
    # The smallest network's counts come first, so that one-time work of the process is not timed.
    calls = {key: python_calls_a_step(loop, 50, 150) for key, loop in loops_of(WORKS["linear"], names).items()}
    aimed: dict[str, dict[Key, Slopes]] = {}
    tables = []
    for name, work in WORKS.items():
        if nets is None or name in nets:
            loops = loops_of(work, names)
            steps = {key: work.fewer if key[0] in SLOW else work.long for key in loops}
            few = {key: loop for key, loop in loops.items() if _is_aimed_at(name, *key)}
            aimed[name] = time_loops(few, work.short, steps, TIMES_AS_OFTEN * rounds)
            all_of_them = time_loops(loops, work.short, steps, rounds)
            ends = " or ".join(f"{count:,}" for count in sorted(set(steps.values())))
            tables += ["", f"`{name}`, slopes between {work.short} and {ends} steps:", ""]
            tables += _of_a_net(all_of_them, calls)
    return [versions(), "", *_targets(aimed, calls), *tables]


def _is_aimed_at(net: str, name: str, way: str) -> bool:
    """Return whether the stated target applies to this loop."""
    if net == "linear" and (name == OURS or way == "bare"):
        return name not in SLOW  # its additions are so large that ours cannot be measured
    return name == RAW or (name == OURS and any((net, way) == target[1:3] for target in TARGETS))


def _of_a_net(slopes: Mapping[Key, Slopes], calls: Mapping[Key, float]) -> list[str]:
    base = slopes[RAW, ""]
    titles = ["", "", "us a step", "over raw, us", "ratio", "processor: over raw, us", "ratio", "Python calls over raw"]
    lines = [row(*titles), "|---" * len(titles) + "|"]
    own = f"{_us(base.busy)} a step"
    lines.append(row("", RAW, _us(base.wall), "", "", own, "", f"{calls[RAW, '']:.0f} a step"))
    for way in WAYS:
        for (name, its), slope in slopes.items():
            if its == way.name:
                cells = [_us(slope.wall)]
                for mine, others in ((slope.wall, base.wall), (slope.busy, base.busy)):
                    cells += [_us(over(mine, others)), spread(ratios(mine, others), 3)]
                shown = f"**{name}**" if name == OURS else name
                lines.append(row(its, shown, *cells, f"{calls[name, its] - calls[RAW, '']:.0f}"))
    return lines


def _targets(found: Mapping[str, Mapping[Key, Slopes]], calls: Mapping[Key, float]) -> list[str]:
    """Return how we compare with the targets, as far as it was measured."""
    lines = [row("", "aim", "on the clock", "in processor time", "Python calls"), "|---" * 5 + "|"]
    for label, net, way, aim in TARGETS:
        if (OURS, way) in found.get(net, {}):
            ours, base = found[net][OURS, way], found[net][RAW, ""]
            both = [spread(ratios(ours.wall, base.wall), 3), spread(ratios(ours.busy, base.busy), 3)]
            lines.append(row(label, f"at most {aim:.2f}", *both, f"{calls[OURS, way] - calls[RAW, '']:.0f}"))
    linear = found.get("linear", {})
    if (OURS, "bare") in linear:
        five, bare = linear[OURS, "five values"], linear[OURS, "bare"]
        both = [_us(over(five.wall, bare.wall)), _us(over(five.busy, bare.busy))]
        more = calls[OURS, "five values"] - calls[OURS, "bare"]
        lines.append(row("five logged values in `linear`, us", "at most 15", *both, f"{more:.0f}"))
        lines += _beside_others(linear, calls)
    return lines


def _beside_others(linear: Mapping[Key, Slopes], calls: Mapping[Key, float]) -> list[str]:
    """Return what the fastest of the others adds to a bare step, and its multiple of ours, by medians."""
    base = linear[RAW, ""]
    bare = {name: slope for (name, way), slope in linear.items() if way == "bare"}
    if len(bare) == 1:
        return []
    cells = []
    for unit, added in (
        (" us", {name: 1e6 * median(over(slope.wall, base.wall)) for name, slope in bare.items()}),
        (" us", {name: 1e6 * median(over(slope.busy, base.busy)) for name, slope in bare.items()}),
        ("", {name: calls[name, "bare"] - calls[RAW, ""] for name in bare}),
    ):
        ours = added.pop(OURS)
        best = min(added, key=added.__getitem__)
        times = f"{added[best] / ours:.1f}" if ours > 0 else "ours adds nothing"
        digits = 1 if unit else 0
        cells.append(f"{times} ({best} {added[best]:.{digits}f}{unit}, ours {ours:.{digits}f}{unit})")
    return [row("what the least of the others adds to a bare step of `linear`, over ours", "at least 5", *cells)]


def _us(seconds: Sequence[float]) -> str:
    return spread([1e6 * value for value in seconds], 1)
