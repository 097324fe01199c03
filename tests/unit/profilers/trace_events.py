"""The trace-event format, as far as a trace of ours uses it, and whether spans nest.

From "Trace Event Format" (the Catapult project's documentation, which Perfetto reads): an object with ``traceEvents``;
each event has a phase ``ph``; complete events ("X") have a name, a time ``ts`` and a duration ``dur`` in microseconds,
and belong to a process and a thread; instant events ("i") have a scope; flow events ("s", "t", "f") an id; metadata
events ("M") one of five names with their arguments.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_TIME = {"type": "number", "minimum": 0}
_WHERE = {"pid": {"type": ["integer", "string"]}, "tid": {"type": ["integer", "string"]}}


def _event(phase: list[str], required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "if": {"properties": {"ph": {"enum": phase}}, "required": ["ph"]},
        "then": {
            "required": ["ph", "ts", "pid", "tid", *required],
            "properties": {"ts": _TIME, **_WHERE, "args": {"type": "object"}, **properties},
        },
    }


SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["ph"],
                "properties": {
                    "ph": {"enum": list("BEXiIsftMCPbne")},
                    "cat": {"type": "string"},
                    "name": {"type": "string"},
                },
                "allOf": [
                    _event(["X"], ["name", "dur"], dur=_TIME),
                    _event(["B"], ["name"]),
                    _event(["E"], []),
                    _event(["i", "I"], ["name"], s={"enum": ["g", "p", "t"]}),
                    _event(["s", "f", "t"], ["id", "name"], id={"type": ["integer", "string"]}),
                    _event(["C"], ["name", "args"]),
                    _event(
                        ["M"],
                        ["name", "args"],
                        name={
                            "enum": [
                                *("process_name", "process_labels", "process_sort_index"),
                                *("thread_name", "thread_sort_index"),
                            ]
                        },
                    ),
                ],
            },
        },
    },
}


def spans_of(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The complete events of that name, by their beginnings."""
    found = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["name"] == name]
    return sorted(found, key=lambda one: one["ts"])


def is_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3


def overlapping(trace: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs of complete events of one thread that overlap, and of which neither is within the other."""
    threads = defaultdict(list)
    for one in trace["traceEvents"]:
        if one["ph"] == "X":
            threads[one["pid"], one["tid"]].append(one)
    found = []
    for events in threads.values():
        open_ones: list[dict[str, Any]] = []
        for one in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            while open_ones and open_ones[-1]["ts"] + open_ones[-1]["dur"] <= one["ts"] + 1e-3:
                open_ones.pop()
            if open_ones and not is_within(one, open_ones[-1]):
                found.append((open_ones[-1]["name"], one["name"]))
            open_ones.append(one)
    return found
