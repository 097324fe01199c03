"""O-05: strategies with an NCCL group created by the run, on one device and on all available ones."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runs import REHEARSED, Net, rows, trained, weights
from torch import Tensor, nn

from cpu_kernels import FP16
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.testing import requires_cuda
from worlds import on_ranks

pytestmark = [pytest.mark.cuda, requires_cuda()]

ZERO = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
STRATEGIES = ["ddp", "fsdp", *(pytest.param(f"deepspeed_stage_{stage}", marks=ZERO) for stage in (1, 2, 3))]
RANKS = [1, pytest.param(2, marks=requires_cuda(2))]
TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 3e-2, "16-mixed": 3e-2}


def _trained(strategy: str, ranks: int, precision: str) -> Tensor:
    torch.set_float32_matmul_precision("highest")
    module = Net()
    settings: dict[str, Any] = {"gradient_clip_val": 0.5, "max_epochs": 2, "seed": 1}
    trained(module, strategy=strategy, devices=ranks, precision=precision, **settings)
    return weights(module)


@pytest.mark.parametrize(
    ("precision", "ranks"),
    [*((precision, 1) for precision in TOLERANCE), pytest.param("bf16-mixed", 2, marks=requires_cuda(2))],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_has_the_weights_of_one_device(strategy: str, precision: str, ranks: int) -> None:  # O-05, B-01
    if REHEARSED and not FP16 and strategy.startswith("deepspeed") and precision == "16-mixed":
        pytest.skip("the processor of this rehearsal has no fp16, which ZeRO needs")
    found = on_ranks(_trained, ranks, strategy, ranks, precision, process_group=None, timeout=150)
    assert all(torch.equal(each, found[0]) for each in found)
    if ranks == 1:
        tolerance = TOLERANCE[precision]
        torch.testing.assert_close(found[0], _trained("single_device", 1, precision), atol=tolerance, rtol=tolerance)


def _saved(folder: str, strategy: str, ranks: int) -> Tensor:
    module = Net()
    saves = Checkpoint(folder, every_n_train_steps=2, save_top_k=-1)
    trained(module, strategy=strategy, devices=ranks, seed=1, callbacks=[saves], enable_checkpointing=True)
    return weights(module)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_a_strategy_resumes_in_one_process(strategy: str, ranks: int) -> None:  # O-05
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(_saved, ranks, folder, strategy, ranks, process_group=None, timeout=150)
        (path,) = Path(folder).glob("*step=2")
        module = Net()
        trained(module, rows(batch_size=8 * ranks), accelerator="cpu", seed=1, ckpt_path=path)  # global batches
        torch.testing.assert_close(weights(module), found[0], atol=1e-4, rtol=1e-4)


class WideNet(Net):
    """Parameters need more memory than activations. It keeps its optimizer, so that the state outlives a run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = super().configure_optimizers()
        return self.optimizer


def _memory_at_the_end(strategy: str) -> float:
    """Return how much more memory the end of a run needs than the run has, in sizes of the parameters."""
    allocated: list[int] = []

    def note(*_: Any) -> None:
        gc.collect()
        torch.cuda.synchronize()  # frees what other streams have used
        allocated.append(torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    module = WideNet()
    size = sum(parameter.nbytes for parameter in module.parameters())
    trained(module, strategy=strategy, callbacks=[LambdaCallback(on_train_end=note)])
    return (torch.cuda.max_memory_allocated() - allocated[0]) / size


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_end_of_a_run_takes_little_memory(strategy: str) -> None:
    # O-05: a step needs memory for gradients besides; whole weights and states beside DeepSpeed's would be three sizes
    assert on_ranks(_memory_at_the_end, 1, strategy, process_group=None, timeout=150)[0] <= 1.01
