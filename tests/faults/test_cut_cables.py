"""A node loses its link: the others report it, and the run resumes when the link is back. Rows B-01, F-02, G-02,
G-04.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import link_run
import pytest
import torch
from two_nodes import two_nodes, why_not

LIMIT = 90.0  # seconds
SCRIPT = Path(link_run.__file__)

pytestmark = [
    pytest.mark.skipif("FAULTS" not in os.environ, reason="a minute of waiting for timeouts: make faults"),
    pytest.mark.timeout(4 * LIMIT),
]


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.05)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.skipif("FAULTS" in os.environ and why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_link_that_goes_down(comes_back: bool, tmp_path: Path) -> None:
    outs = [tmp_path / f"node-{node}" for node in (0, 1)]
    with two_nodes() as nodes, outs[0].open("w") as out_0, outs[1].open("w") as out_1:
        runs = [
            nodes.torchrun(
                node, SCRIPT, str(tmp_path), str(node), max_restarts=2 if comes_back else 0, out=(out_0, out_1)[node]
            )
            for node in (0, 1)
        ]
        _wait_until(lambda: int(_text(tmp_path / "step-0") or 0) >= 12, "step 12")
        nodes.link(up=False)
        down = time.monotonic()
        _wait_until(lambda: "Rank 0 has lost rank 1" in outs[0].read_text(), "the loss of rank 1")
        assert time.monotonic() - down < link_run.TIMEOUT + 20  # G-04
        if comes_back:
            nodes.link(up=True)
            for run in runs:
                assert run.wait(LIMIT) == 0, [out.read_text() for out in outs]
        else:
            assert runs[0].wait(LIMIT) == 1
            # Its torchrun waits until the system gives up the connection; its rank does not.
            _wait_until(lambda: "Rank 1 has lost the store" in outs[1].read_text(), "the loss of the store")
            return
    starts = [int(step) for step in _text(tmp_path / "starts-0").split()]
    assert starts[0] == 0
    assert starts[1:], "it was not started again"
    assert all(10 <= step < link_run.STEPS for step in starts[1:])
    expected = link_run.run(tmp_path / "undisturbed", batch_size=4).layer.weight.detach()
    for node in (0, 1):
        assert torch.allclose(torch.load(tmp_path / f"weight-{node}.pt"), expected, atol=1e-6)
