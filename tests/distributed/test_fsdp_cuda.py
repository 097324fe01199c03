"""FSDPStrategy over NCCL on one GPU."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from fsdp_nets import Block, Deep, DeepRegression, Tied
from small_runs import about, loader, quiet, refusal, seeded, trained
from torch import Tensor, nn

from drivetrain.testing import requires_cuda
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

pytestmark = [pytest.mark.cuda, requires_cuda()]

ACCELERATOR = "cuda"
ON_GPU: dict[str, Any] = {"accelerator": ACCELERATOR, "devices": 1}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"sharding": "grad_op"},
    "offload": {"cpu_offload": True},
    "checkpointed": {"activation_checkpointing": [Block], "activation_policy": "save_matmuls"},
    "prefetch": {"forward_prefetch": 2, "backward_prefetch": 2},
    "ignored": {"ignored": ["net.head.*"]},
}


class Overflowing(DeepRegression):
    """One batch overflows in 16-mixed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * 1e-2
        return loss * 1e30 if batch_idx == 1 else loss


class Late(DeepRegression):
    """Built in `configure_model`."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = Deep()


def _trained(strategy: Any, precision: str = "32-true", module: Any = None, **settings: Any) -> Tensor:
    if module is None:
        kind = Overflowing if precision == "16-mixed" else DeepRegression
        module = kind(seeded(Tied if precision == "32-true" else Deep))
    settings = {**ON_GPU, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2, **settings}
    return trained(module, loader(40, 8), strategy=strategy, precision=precision, **settings).cpu()


def _cases(precision: str) -> dict[str, Tensor]:
    return {name: _trained(FSDPStrategy(**options), precision) for name, options in CASES.items()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_one_gpu_equals_the_plain_module_on_it(precision: str) -> None:
    # B-01, B-05, B-06, D-07, D-08: the run creates its process group; in 16-mixed a step is skipped
    expected = _trained("single_device", precision)
    for name, found in on_ranks(_cases, 1, precision, process_group=None, timeout=180)[0].items():
        atol = 2.0**-8 if precision == "bf16-true" else 1e-5
        torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4, msg=about(name))


def test_modules_built_without_storage_are_the_same_on_the_gpu() -> None:  # D-03: drawn on the CPU
    train = partial(_trained, module=Late(), seed=3)
    (built,) = on_ranks(train, 1, FSDPStrategy(), process_group=None, timeout=120)
    torch.testing.assert_close(built, train("single_device", accelerator="cpu"), atol=1e-4, rtol=1e-4)


def test_blocks_that_are_compiled() -> None:  # D-09; a rehearsal omits it by this name
    train = partial(_trained, module=DeepRegression())
    compiled = FSDPStrategy(compile=True, activation_checkpointing=[Block])
    (found,) = on_ranks(train, 1, compiled, process_group=None, timeout=300)
    torch.testing.assert_close(found, train("single_device"), atol=1e-4, rtol=1e-4)


def _on_two_devices() -> str:
    module = DeepRegression()
    module.net.head.to(ACCELERATOR)
    return refusal(module, loader(16, 8), strategy="fsdp", **ON_GPU)


def test_a_module_on_two_devices_is_refused() -> None:  # C-06
    (text,) = on_ranks(_on_two_devices, 1, process_group=None, timeout=120)
    assert text.startswith("ConfigurationError")
    assert "'net.head.weight' on cuda:0" in text


def _peak(offload: bool) -> int:
    """Return the peak of a run's memory in percent of the parameters' size, without the workspaces of cuBLAS."""
    eye = torch.eye(8, device=ACCELERATOR)
    nn.functional.linear(eye, eye, eye[0]) @ eye  # allocates the workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module = DeepRegression(seeded(lambda: Deep(8, 512)))
    held = sum(parameter.nbytes for parameter in module.parameters())
    quiet(strategy=FSDPStrategy(cpu_offload=offload, wrap=[Block]), **ON_GPU).fit(module, loader(16, 8))
    return (torch.cuda.max_memory_allocated() - before) * 100 // held


def test_offloading_leaves_the_gpu_a_unit_or_two() -> None:
    # D-08: otherwise parameters, gradients and two moments are there
    assert on_ranks(_peak, 1, False, process_group=None, timeout=120)[0] >= 400
    assert on_ranks(_peak, 1, True, process_group=None, timeout=120)[0] < 150
