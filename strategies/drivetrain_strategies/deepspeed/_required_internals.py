"""The private names of DeepSpeed that a run requires. They are checked before anything is wrapped.

Private names change between releases. Names that exist only once an engine is built are listed in `docs/versions.md`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version

from drivetrain.errors import ConfigurationError, listed
from drivetrain_strategies.deepspeed._library import OLDEST_VERSION

REQUIRED_NAMES = {
    "deepspeed.runtime.engine.DeepSpeedEngine": (
        *("_backward_prologue", "_broadcast_model", "allreduce_gradients", "was_step_applied"),
        "zero_optimization_stage",
    ),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": (
        *("_gradient_reduction_buffer_dtype", "_lazy_init_hp_params_optimizer_state", "allreduce_bucket"),
        *("clear_backward_seen_flag", "finalize_gradient_accumulation_boundary", "get_gradient_for_reduction"),
        *("overlapping_partition_gradients_reduce_epilogue", "reduce_ready_partitions_and_remove_grads"),
        *("reduce_ipg_grads", "reset_cpu_buffers", "scaled_global_norm", "setup_buckets", "update_lp_params"),
    ),
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": (
        *("_lazy_init_hp_params_optimizer_state", "get_grads_for_norm", "update_lp_params"),
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": (
        *("_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", "_get_fp32_grad_state_partition"),
        *("_get_norm_groups", "_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out"),
        *("_partition_all_parameters", "_pre_step", "_reassign_or_swap_out_partitioned_parameters"),
        *("_release_swap_buffers", "_swappable_optimizer_subgroup", "clear_backward_seen_flag"),
        *("finalize_gradient_accumulation_boundary", "get_param_id", "reset_cpu_buffers"),
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator": (
        "_PartitionedParameterCoordinator__params_to_release",
    ),
    "deepspeed.runtime.zero.partition_parameters.Init": ("_convert_to_deepspeed_param", "_enable_mem_efficient_linear"),
    "deepspeed.runtime.utils": ("combine_grad_norm_groups", "get_global_norm_of_tensors"),
}


def check_names() -> None:
    """Refuse a DeepSpeed version that lacks one of the required names.

    Raises:
        ConfigurationError: names the version and the missing names.
    """
    missing = [
        f"{owner.rpartition('.')[2]}.{name}"
        for owner, names in REQUIRED_NAMES.items()
        for name in names
        if not _has(owner, name)
    ]
    if missing:
        raise ConfigurationError(
            f"strategy='deepspeed' cannot run on deepspeed {version('deepspeed')}.",
            "the strategy uses private names, which change between releases, and this version lacks "
            f"{listed(missing)}.",
            f"pip install 'deepspeed=={OLDEST_VERSION}', or use strategy='fsdp'.",
        )


def _has(owner: str, name: str) -> bool:
    module, _, last = owner.rpartition(".")
    if last[0].islower():
        return hasattr(importlib.import_module(owner), name)
    return hasattr(getattr(importlib.import_module(module), last, None), name)
