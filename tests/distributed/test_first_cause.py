"""What the user reads of a failed run: the first cause, once, and where it was. Rows G-01, G-02."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import run_script

# Two epochs of eight micro-batches a rank, two of them a window.
_SCRIPT = """
class Failing(Model):
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 3 and self.global_rank == 1:
            if "--kill" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)

quiet(strategy="ddp", devices=2, max_epochs=2, accumulate_grad_batches=2).fit(Failing(), loader(64, 4))
"""
_WHERE = "Where: rank 1, epoch 1, global step 5, batch index 3"


@pytest.mark.parametrize("launched", ["subprocess", "torchrun"])
def test_the_first_cause_is_printed_once_with_its_place(tmp_path: Path, launched: str) -> None:  # G-01
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    # In files of their own: torchrun ends with a traceback of itself, which no rank can help.
    logs = ("--log-dir", str(tmp_path / "torchrun"), "--redirects", "2")
    run = run_script(tmp_path, _SCRIPT, *((*torchrun, *logs) if launched == "torchrun" else ()))
    assert run.code == 1
    errors = run.errors
    if launched == "torchrun":
        errors = "".join(file.read_text() for file in (tmp_path / "torchrun").rglob("stderr.log"))
    assert errors.count("Traceback (most recent call last)") == 1, errors
    assert errors.count(f"ValueError: boom\n{_WHERE}\n") == 1, errors
    told = [line for line in errors.splitlines() if line.startswith("Rank 0 ends")]
    assert told == ["Rank 0 ends because of another: Rank 1 failed with ValueError: boom"], errors
