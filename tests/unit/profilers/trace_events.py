"""Spans in traces of the format of Chrome and Perfetto, and whether they nest."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def spans_of(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the complete events of that name, by their beginnings."""
    found = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["name"] == name]
    return sorted(found, key=lambda one: one["ts"])


def is_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3


def overlapping(trace: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of complete events of one thread that overlap, and of which neither is within the other."""
    threads = defaultdict(list)
    for one in trace["traceEvents"]:
        if one["ph"] == "X":
            threads[one["pid"], one["tid"]].append(one)
    found = []
    for events in threads.values():
        open_events: list[dict[str, Any]] = []
        for one in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= one["ts"] + 1e-3:
                open_events.pop()
            if open_events and not is_within(one, open_events[-1]):
                found.append((open_events[-1]["name"], one["name"]))
            open_events.append(one)
    return found
