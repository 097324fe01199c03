"""The entry points of DeepSpeed's stages, registered in ``pyproject.toml``. This module does not import deepspeed."""

from __future__ import annotations

from drivetrain_strategies.deepspeed.strategy import DeepSpeedStrategy


def stage_1() -> DeepSpeedStrategy:
    return DeepSpeedStrategy(stage=1)


def stage_2() -> DeepSpeedStrategy:
    return DeepSpeedStrategy(stage=2)


def stage_3() -> DeepSpeedStrategy:
    return DeepSpeedStrategy(stage=3)


def stage_1_offload() -> DeepSpeedStrategy:
    return DeepSpeedStrategy(stage=1, offload_optimizer="cpu")


def stage_2_offload() -> DeepSpeedStrategy:
    return DeepSpeedStrategy(stage=2, offload_optimizer="cpu")


def stage_3_offload() -> DeepSpeedStrategy:
    return DeepSpeedStrategy(stage=3, offload_optimizer="cpu", offload_parameters="cpu")
