"""The memory that a rank holds under each strategy, and the data that it sends in a step: counted, not timed."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.by_engine import Trained, train_by_engine
from benchmarks.nets import GPT
from benchmarks.traffic import a_step, in_words
from drivetrain import Strategy
from drivetrain.testing import run_distributed
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy

SPREAD = {"stage": 3, "stage3_param_persistence_threshold": 0}
"""Stage 3 with no parameter so small that it stays whole: in a net of this size all would."""

ROWS: list[tuple[str, int, type[Strategy], dict[str, Any]]] = [
    ("`single_device`", 1, SingleDeviceStrategy, {}),
    ("`ddp`", 2, DDPStrategy, {}),
    ("`ddp`", 4, DDPStrategy, {}),
    ("`fsdp`", 2, FSDPStrategy, {}),
    ("`fsdp`", 4, FSDPStrategy, {}),
    ("`fsdp_grad_op`", 4, FSDPStrategy, {"sharding": "grad_op"}),
    ("`hsdp`, 2 copies over 2 ranks", 4, FSDPStrategy, {"sharding": "hybrid", "replicate_size": 2}),
    ("`deepspeed_stage_1`", 2, DeepSpeedStrategy, {"stage": 1}),
    ("`deepspeed_stage_2`", 2, DeepSpeedStrategy, {"stage": 2}),
    ("`deepspeed_stage_2`", 4, DeepSpeedStrategy, {"stage": 2}),
    ("`deepspeed_stage_3`", 2, DeepSpeedStrategy, SPREAD),
    ("`deepspeed_stage_3`", 4, DeepSpeedStrategy, SPREAD),
]
"""What the row is called, over how many ranks, and the strategy."""


class Weighed(Trained):
    """Records what this rank holds once a step is done, while its gradients still exist."""

    held: tuple[int, int, int]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        parameters: list[Tensor] = list(self.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = self.optimizers().state.values()
        moments = [value for state in states for value in state.values() if value.dim()]
        strategy = self.trainer.strategy
        buckets = _bucket_bytes(strategy) if isinstance(strategy, DDPStrategy) else 0
        self.held = _bytes(parameters), _bytes(gradients) + buckets, _bytes(moments)


class WeighedZero(Trained):
    """Records the live tensors after a backward: ZeRO keeps masters, gradients and buckets in tensors of its own."""

    held: tuple[int, int, int]

    def on_after_backward(self) -> None:
        state = self.optimizers().state  # referenced by the masters
        parameters = [getattr(each, "ds_tensor", each) for each in self.parameters()]
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        moments = [value for values in state.values() for value in values.values() if value.dim()]
        rest = _storages([*_alive(), *gradients])
        weighed = []
        for known in ([*parameters, *state], moments):
            weighed.append(sum(rest.pop(pointer, 0) for pointer in _storages(known)))
        self.held = weighed[0], sum(rest.values()), weighed[1]


def _bucket_bytes(strategy: DDPStrategy) -> int:
    """Return the bytes of the buckets that DDP copies gradients into."""
    assert strategy.ddp_module is not None
    known = strategy.ddp_module._get_ddp_logging_data()
    assert not known["gradient_as_bucket_view"]
    return sum(map(int, (known.get("rebuilt_bucket_sizes") or known["bucket_sizes"]).split(",")))


def _alive() -> list[Tensor]:
    gc.collect()
    # without calling isinstance, which asks some objects for their class
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    """Return bytes by address, of floating-point tensors only, which leaves out tokens."""
    storages = [each.untyped_storage() for each in tensors if each.is_floating_point() and not each.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _bytes(tensors: list[Tensor]) -> int:
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def weighed(kind: type[Strategy], options: dict[str, Any]) -> tuple[tuple[int, int, int], dict[str, float], float]:
    """On one rank: return bytes of parameters, gradients and optimizer state; collectives and bytes sent per step."""
    module = WeighedZero() if kind is DeepSpeedStrategy else Weighed()
    train_by_engine(kind(**options), 2, module)
    return module.held, *a_step(lambda steps: train_by_engine(kind(**options), steps))


def table() -> list[str]:
    """Return the lines of the table; of several ranks the one that holds most is shown."""
    net = GPT()
    whole, block = (_bytes(list(part.parameters())) for part in (net, net.blocks[0]))
    lines = [
        f"A GPT of {kib(whole)} KiB of parameters in float32, {kib(block)} in each of {len(net.blocks)} blocks; AdamW.",
        "",
        "| Strategy | ranks | parameters, KiB | gradients, KiB | AdamW, KiB | sent a step, KiB | collectives a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ranks, kind, options in ROWS:
        runs = run_distributed(weighed, ranks, kind, options, timeout=300.0)
        held, collectives, nbytes = max(runs, key=lambda run: sum(run[0]))
        cells = [name, str(ranks), *map(kib, held), kib(nbytes), in_words(collectives)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def kib(nbytes: float) -> str:
    """Format bytes as KiB for a table cell."""
    return f"{nbytes / 1024:,.1f}"
