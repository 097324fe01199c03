"""Builds DeepSpeed's configuration from the user's config, the strategy's arguments and the settings of `Fit`."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.strategies import RunSettings

Config = Mapping[str, Any] | str | os.PathLike[str] | None

TOP_LEVEL_KEYS = {
    *{"activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet"},
    *{"comms_logger", "communication_data_type", "compile", "csv_monitor", "data_efficiency"},
    *{"data_parallel_size", "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather"},
    *{"disable_python_gc", "dump_state", "expert_parallel", "flops_profiler", "fp16"},
    *{"gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping"},
    *{"gradient_predivide_factor", "hybrid_engine", "log_level", "managed_gradient_accumulation"},
    *{"memory_breakdown", "optimizer", "pipeline", "prescale_gradients", "scheduler"},
    *{"seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print", "tensor_parallel"},
    *{"tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu"},
    *{"use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb"},
    *{"weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"},
    *{"zero_optimization"},
}
"""The top-level keys that DeepSpeed reads. DeepSpeed would silently accept any other key."""

PRECISION_SECTIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
"""The section of DeepSpeed's configuration that enables a mixed precision, by the precision's canonical name."""

LOSS_SCALE_SETTINGS = {"hysteresis": 1, "loss_scale_window": 2000}
"""Settings with which DeepSpeed changes the loss scale as torch's ``GradScaler`` does.

The scale halves at each overflow and doubles after 2,000 steps without an overflow. With DeepSpeed's defaults, the
first overflow does not change the scale, and the scale doubles after 1,000 steps.
"""


def combine(source: Config, *arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the user's config, completed by the strategy's arguments.

    Args:
        source: a dict, or the path of a JSON file.
        *arguments: the arguments, each in the form of a config.

    Raises:
        ConfigurationError: the config cannot be read, has an unknown key, or contradicts an argument, an argument
            contradicts another one, or the ZeRO stage does not support a setting.
    """
    config = _read(source)
    for argument in arguments:
        _merge(config, argument, "")
    zero = config["zero_optimization"]
    if zero.get("stage", "auto") == "auto":
        zero["stage"] = 2
    _check_zero(zero)
    return config


def _read(source: Config) -> dict[str, Any]:
    if source is None:
        return {}
    try:
        config = dict(source) if isinstance(source, Mapping) else dict(json.loads(Path(source).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"config={source!r} cannot be read: {error}",
            "config must be a dict, or the path of a JSON file in DeepSpeed's format.",
            "check the path, or pass a dict.",
        ) from error
    for key in config:
        if key not in TOP_LEVEL_KEYS:
            raise ConfigurationError(
                f"config: DeepSpeed has no key {key!r}.{nearest(str(key), TOP_LEVEL_KEYS)}",
                "DeepSpeed would silently ignore this key.",
                "correct the key, or remove it.",
            )
    return copy.deepcopy(config)


def offload(target: str | None, argument: str, nvme_path: str | None) -> dict[str, Any] | None:
    """Return DeepSpeed's section for an offload; None if nothing is offloaded.

    Raises:
        ConfigurationError: ``nvme_path`` is missing.
    """
    if target is None:
        return None
    if target == "nvme" and nvme_path is None:
        raise ConfigurationError(
            f"{argument}='nvme' without nvme_path.", "DeepSpeed needs a folder on the drive.", "set nvme_path='/...'."
        )
    return {"device": target, "nvme_path": nvme_path} if target == "nvme" else {"device": target}


def _check_zero(zero: Mapping[str, Any]) -> None:
    stage = zero["stage"]
    if stage not in (1, 2, 3):
        raise ConfigurationError(
            f"stage={stage!r}.",
            "ZeRO has the stages 1, 2 and 3. Stage 0 would be plain DDP.",
            "use stage 1, 2 or 3, or strategy='ddp'.",
        )
    parameters, optimizer = (
        (zero.get(key) or {}).get("device", "none") for key in ("offload_param", "offload_optimizer")
    )
    if stage < 3 and (parameters != "none" or optimizer == "nvme"):
        raise ConfigurationError(
            f"offload_parameters={parameters!r} and offload_optimizer={optimizer!r} at stage {stage}.",
            "only stage 3 partitions parameters, and offloads to NVMe.",
            "use stage=3, or only offload_optimizer='cpu'.",
        )
    if zero.get("round_robin_gradients"):
        raise ConfigurationError(
            "config: zero_optimization.round_robin_gradients=True.",
            "DeepSpeed then assigns parameters to ranks in an order that it does not report, so optimizer state would "
            "be saved under wrong names.",
            "remove this setting.",
        )


def resolve(config: Mapping[str, Any], run: RunSettings, precision: str, ranks: int) -> dict[str, Any]:
    """Return the configuration for DeepSpeed.

    `Fit` manages averaging, accumulation and batch sizes, so DeepSpeed's own accumulation is set to one micro-batch.

    Args:
        config: the result of `combine`. This function does not modify it.
        run: the run's settings.
        precision: canonical name of the precision.
        ranks: number of ranks.

    Raises:
        ConfigurationError: the config contradicts `Fit`. The error names both settings.
    """
    resolved = copy.deepcopy(dict(config))
    if "bfloat16" in resolved:
        resolved.setdefault("bf16", resolved.pop("bfloat16"))
    for path, (value, source) in _values_of_fit(run, precision, ranks).items():
        section, _, key = path.rpartition(".")
        configured = (resolved.get(section, {}) if section else resolved).get(key, "auto")
        if configured not in ("auto", None) and value is not None and configured != value:
            raise _contradiction(path, configured, source)
    batch, clipping = run.batch_size or 1, run.gradient_clip_val
    if clipping is None and resolved.get("gradient_clipping") != "auto":
        clipping = resolved.get("gradient_clipping")
    resolved |= {
        "train_micro_batch_size_per_gpu": batch,
        "train_batch_size": batch * ranks,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": float(
            clipping or 0.0
        ),  # always set, since DeepSpeed's default would clip to a norm of 1.0
    }
    resolved.setdefault("steps_per_print", None)
    # `check_optimizers` decides which optimizers are allowed, so DeepSpeed's own check is turned off. torch's
    # optimizers may step offloaded state.
    resolved["zero_allow_untested_optimizer"] = True
    resolved.setdefault("zero_force_ds_cpu_optimizer", False)
    zero = resolved["zero_optimization"]
    resolved["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    enabled_section = PRECISION_SECTIONS.get(precision)
    for section in {"bf16", "fp16"} & resolved.keys():
        resolved[section] = {**resolved[section], "enabled": section == enabled_section}
    if enabled_section is not None:
        defaults = LOSS_SCALE_SETTINGS if enabled_section == "fp16" else {}
        resolved[enabled_section] = {"enabled": True, **defaults, **resolved.get(enabled_section, {})}
        # Gradients are computed in half precision, but accumulated and exchanged in float32.
        resolved["data_types"] = {"grad_accum_dtype": "fp32", **resolved.get("data_types", {})}
        resolved.setdefault("communication_data_type", "fp32")
    for path in _auto_keys(resolved):
        raise ConfigurationError(
            f"config: {path} is 'auto'.",
            "no setting of Fit determines this value.",
            "set a value, or remove the key to use DeepSpeed's default.",
        )
    return resolved


def _values_of_fit(run: RunSettings, precision: str, ranks: int) -> dict[str, tuple[Any, str]]:
    """Return the values that settings of DeepSpeed have in this run, or None, each with what sets it."""
    values: dict[str, tuple[Any, str]] = {
        "gradient_clipping": (run.gradient_clip_val, f"Fit(gradient_clip_val={run.gradient_clip_val})"),
        "torch_autocast.enabled": (False, f"Fit(precision={precision!r}), which runs autocast itself"),
    }
    for name, section in PRECISION_SECTIONS.items():
        values[f"{section}.enabled"] = name == precision, f"Fit(precision={precision!r})"
    if run.stage == "fit":
        window, size = run.accumulate_grad_batches, run.batch_size
        total = f"batch_size={size} x accumulate_grad_batches={window} x {ranks} ranks"
        values["gradient_accumulation_steps"] = window, f"Fit(accumulate_grad_batches={window})"
        values["train_micro_batch_size_per_gpu"] = size, f"the loader's batch_size={size}"
        values["train_batch_size"] = None if size is None else size * window * ranks, total
    return values


def _merge(config: dict[str, Any], arguments: Mapping[str, Any], prefix: str) -> None:
    for key, value in arguments.items():
        configured = config.get(key, "auto")
        if configured != "auto" and configured != value:
            if isinstance(configured, dict) and isinstance(value, dict):
                _merge(configured, value, f"{prefix}{key}.")
                continue
            raise _contradiction(f"{prefix}{key}", configured, f"DeepSpeedStrategy's {key}={value!r}")
        config[key] = copy.deepcopy(value)


def _auto_keys(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _auto_keys(child, f"{path}.{key}" if path else str(key))
    elif value == "auto":
        yield path


def _contradiction(key: str, configured: Any, other: str) -> ConfigurationError:
    return ConfigurationError(
        f"config: {key}={configured!r} contradicts {other}.",
        "only one of them can apply.",
        "give both the same value, or remove the key from the config, since missing keys are set from Fit.",
    )
