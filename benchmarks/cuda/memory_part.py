"""The peak device memory of a step under FSDP, ZeRO and DDP, by hand and with the engine."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.by_engine import train_by_engine
from benchmarks.by_hand import train_by_hand
from benchmarks.cuda.devices import DEVICE, full_precision, on_ranks
from benchmarks.cuda.loops import BF16
from benchmarks.cuda.outcome import Outcome
from benchmarks.cuda.parts import Piece
from benchmarks.deepspeed_by_hand import STAGES, train_by_deepspeed, zero
from benchmarks.nets import GPT
from drivetrain_strategies import FSDPStrategy

COLUMNS = ["Strategy", "devices", "loop", "most allocated, MiB", "over by hand", "reserved, MiB", "left after, MiB"]
STEPS = 6
AUTOCAST = ("engine, bf16-mixed, param_dtype=bf16", "engine, bf16-mixed")
MARGIN = 1.05
"""Of the memory by hand; what is more is a failure."""


def measured(piece: Piece, count: int, rehearse: bool) -> Outcome:
    outcome = Outcome(COLUMNS)
    ranks = count if piece.ranks == 0 else piece.ranks
    found: dict[str, tuple[float, float, float]] = {}
    loops = ["by hand", "engine", *(AUTOCAST if piece.name == "fsdp-bf16" else ())]
    # each in processes of its own: memory that one leaves in the allocator's pools must not affect the next
    for loop in loops:
        by_rank = on_ranks(_weighed, ranks, rehearse, piece.name, loop, rehearse, timeout=piece.seconds)
        found[loop] = max(by_rank)
        most, reserved, left = found[loop]
        ratio = "" if loop == "by hand" else f"{most / max(found['by hand'][0], 1e-9):.3f}"
        numbers = f"{most:,.1f}", ratio, f"{reserved:,.1f}", f"{left:,.1f}"
        outcome.rows.append([f"`{piece.name}`", str(ranks), loop, *numbers])
    outcome.figures = {loop: dict(zip(("most", "reserved", "left"), each, strict=True)) for loop, each in found.items()}
    over = found["engine"][0] / max(found["by hand"][0], 1e-9)
    if over > MARGIN and not rehearse:
        outcome.failures.append(f"{over:.3f} of the memory by hand; at most {MARGIN} is meant")
    if piece.name == "fsdp-bf16":
        outcome.notes.append("bf16-mixed by itself gathers float32 weights, as decision 0008 says")
    return outcome


def _weighed(strategy: str, loop: str, rehearse: bool) -> tuple[float, float, float]:
    """Runs on one rank: return the peak in MiB of a run of several steps."""
    full_precision()
    make = partial(GPT, 64, 2, 4) if rehearse else partial(GPT, 1024, 12, 16)
    run = _loop(strategy, loop, make)
    if strategy in STAGES:
        os.environ["DS_ACCELERATOR"] = DEVICE  # the default of the engine on a device
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    run(2 if rehearse else STEPS)
    torch.cuda.synchronize()
    most, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    gc.collect()
    return most / 2**20, reserved / 2**20, torch.cuda.memory_allocated() / 2**20


def _loop(strategy: str, loop: str, make: Callable[[], GPT]) -> Callable[[int], float]:
    if loop == "by hand":
        if strategy in STAGES:
            return lambda steps: train_by_deepspeed(STAGES[strategy], steps, make, device=DEVICE)
        wrap = {"fsdp": partial(_fsdp, policy=MixedPrecisionPolicy()), "fsdp-bf16": partial(_fsdp, policy=BF16)}
        return lambda steps: train_by_hand(strategy, steps, make, device=DEVICE, wrap=wrap.get(strategy))
    if strategy in STAGES:
        return lambda steps: train_by_engine(zero(strategy), steps, net=make, accelerator=DEVICE)
    if strategy == "fsdp-bf16":
        precision = "bf16-mixed" if loop in AUTOCAST else "32-true"
        options: dict[str, dict[str, Any]] = {
            "engine": {"mixed_precision": BF16},
            AUTOCAST[0]: {
                "mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            },
            AUTOCAST[1]: {},
        }
        chosen = FSDPStrategy(**options[loop])
        return lambda steps: train_by_engine(chosen, steps, net=make, accelerator=DEVICE, precision=precision)
    return lambda steps: train_by_engine(strategy, steps, net=make, accelerator=DEVICE)


def _fsdp(net: GPT, policy: MixedPrecisionPolicy) -> nn.Module:
    """Wrap without the plain sum that `benchmarks.by_hand` needs for gloo."""
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    return net
