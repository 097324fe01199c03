"""The strategies of a program, by name: those of `Fit`, and variants with settings that no name includes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from averaging import Averaging, AveragingInContext
from drivetrain import Strategy
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from oracle.program import Program

VARIANTS: dict[str, Callable[[], Strategy]] = {
    # K-01: with public names only, as in a third-party package.
    "averaging": Averaging,
    "averaging_in_context": AveragingInContext,
    # Several units on two by two ranks are tested in test_fsdp_meshes.py.
    "hsdp_one_unit": lambda: FSDPStrategy(sharding="hybrid", wrap=[]),
    "fsdp_tensor_parallel": lambda: FSDPStrategy(tensor_parallel=2, wrap=[]),
}


def strategy_of(name: str, program: Program) -> Any:
    if name in VARIANTS:
        return VARIANTS[name]()
    if name.startswith("ddp") and program.broadcast is not None:
        return DDPStrategy(
            broadcast_buffers=program.broadcast,
            static_graph=name == "ddp_static_graph",
            find_unused_parameters=name == "ddp_find_unused_parameters_true",
        )
    if name.startswith("deepspeed") and not name.endswith("_offload"):
        # A single sample is not normalised: gradients then arrive in another order, which would be refused.
        unordered = name == "deepspeed_stage_2" and program.net.norm == "batch"
        options: dict[str, Any] = {"find_unused_parameters": True} if unordered else {}
        if not program.optimizers[0].is_torch:
            options["config"] = {"zero_allow_untested_optimizer": True}
        if name == "deepspeed_stage_3_all_sharded":  # small parameters too, which stay whole by default (E-13)
            options["stage3_param_persistence_threshold"] = 0
        return DeepSpeedStrategy(stage=int(name.split("_")[2]), **options) if options else name
    return name
