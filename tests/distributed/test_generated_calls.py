"""Collective calls in generated code, which has no file, line or name of its own. K-04, A-08."""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
from small_runs import Regression, failing, loader, quiet

from drivetrain._engine import collective_calls
from worlds import on_ranks

BY_ALL = "gathered.append(module.all_gather(batch_idx).tolist())"
PAIRED = {"one file", "a file for each rank", "a text for each rank", "compiled anew", "other places"}
ALONE = "batch_idx == 2 and module.trainer.is_global_zero and module.all_gather(1)"


class Generated(Regression):
    """Runs generated code after each batch.

    Args:
        text: one line of code.
        file: the name of its file.
        anew: compile it for each batch.
    """

    def __init__(self, text: str, file: str, anew: bool = False) -> None:
        super().__init__()
        self.text, self.file, self.anew = text, file, anew
        self.code = compile(text, file, "exec")
        self.gathered: list[Any] = []

    def shared(self) -> Any:
        return self.all_gather(1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        code = compile(self.text, self.file, "exec") if self.anew else self.code
        exec(code, {"module": self, "gathered": self.gathered, "batch_idx": batch_idx, "torch": torch})


def _run(text: str, file: str = "<string>", anew: bool = False) -> dict[str, Any]:
    """Train; return what was gathered, how often ranks met, what was raised, and the duration."""
    module, meetings = Generated(text, file, anew), 0
    meet = collective_calls._wait_for_ranks

    def counted(*args: Any) -> bool:
        nonlocal meetings
        meetings += 1
        return meet(*args)

    collective_calls._wait_for_ranks = counted  # type: ignore[assignment]
    began = time.monotonic()
    try:
        with failing() as error:
            quiet(strategy="ddp").fit(module, loader(32, 4))
    finally:
        collective_calls._wait_for_ranks = meet
    return {"gathered": module.gathered, "meetings": meetings, "seconds": time.monotonic() - began, **error}


def _all_cases() -> dict[str, dict[str, Any]]:
    rank, arrive = int(os.environ["RANK"]), collective_calls._ARRIVAL_TIMEOUT
    collective_calls._ARRIVAL_TIMEOUT = timedelta(seconds=1)
    try:
        return {
            "one file": _run(BY_ALL),
            "a file for each rank": _run(BY_ALL, f"<cell {rank}>"),
            "a text for each rank": _run(f"{'pass; ' * rank}{BY_ALL}"),
            "compiled anew": _run(BY_ALL, anew=True),
            # At the same time rank 1 calls from two places, and rank 0 from one that it knows.
            "other places": _run(
                f"if module.global_rank == 1 and batch_idx % 2: {BY_ALL}\nelse: {BY_ALL}", f"<cell {rank}>"
            ),
            # On one line, with the second call under a condition: file and line were known from the first call.
            "alone": _run(f"{BY_ALL}; {ALONE}"),
            "alone in a file of its own": _run(f"{BY_ALL}; {ALONE}", f"<cell {rank}>"),
            "alone by a helper": _run(f"module.shared(); {ALONE.replace('module.all_gather(1)', 'module.shared()')}"),
            "alone at the end": _run(f"{BY_ALL}; {ALONE.replace('2', '3')}"),
            # The call is paired with the next one of the other ranks, at the same batch; this is detected at the next.
            "alone before another": _run(f"for _ in range(2):\n {BY_ALL}\n _ == 0 and {ALONE}"),
            "another call": _run(
                "module.all_gather(1) if module.global_rank else module.trainer.save_checkpoint('nowhere')"
            ),
        }
    finally:
        collective_calls._ARRIVAL_TIMEOUT = arrive


def test_calls_in_generated_code_are_paired_or_refused() -> None:
    ranks = on_ranks(_all_cases, 2, process_group=None)
    everywhere = [[batch, batch] for batch in range(4)]
    for rank, found in enumerate(ranks):
        for case in PAIRED:
            assert found[case]["type"] == "nothing was raised", (rank, case, found[case])
            assert found[case]["gathered"] == everywhere, (rank, case)
            assert found[case]["seconds"] < 5, (rank, case)
        # Known places cause no further wait, even if the code is compiled again.
        assert Counter(found[case]["meetings"] for case in ("one file", "compiled anew")) == {1: 2}
        for case in found.keys() - PAIRED:
            error = found[case]
            assert error["type"] != "nothing was raised", (rank, case)
            assert error["seconds"] < 15, (rank, case, error)
            assert "rank(s) [1]" in error["text"], (rank, case, error)
            assert "is_global_zero" in error["text"], (rank, case, error)
        assert "Rank 0 reached all_gather (training batch 3" in found["alone at the end"]["text"]
        assert "Rank 0 reached all_gather (training batch 2, epoch 0, global step 3)" in found["alone"]["text"]
        assert "rank(s) [0] reached save_checkpoint" in found["another call"]["text"]
    assert [ranks[rank]["other places"]["meetings"] for rank in (0, 1)] == [1, 4]


def test_places_are_distinguished_by_the_running_code() -> None:
    places = collective_calls._CallSites()
    found: list[bool] = []

    def here(frame: Any) -> None:
        found.append(places.is_new(frame))

    names = {"here": here, "frame": __import__("sys")._getframe}
    text = "for _ in range(2): here(frame()); here(frame())"
    for _ in range(2):
        exec(compile(text, "<string>", "exec"), names)
    assert found == [True, True, False, False, *[False] * 4]
    exec(compile(text, "<another>", "exec"), names)  # from another line of this function
    assert found[8:] == [True, True, False, False]


def test_the_memory_for_places_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(collective_calls, "_MAX_CALL_SITES", 50)
    places, names = collective_calls._CallSites(), {"frame": __import__("sys")._getframe}
    for number in range(200):
        names["places"] = places
        exec(f"{'pass; ' * number}places.is_new(frame())", names)
        assert len(places._seen) + len(places._by_identity) < 80
