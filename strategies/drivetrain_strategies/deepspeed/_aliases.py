"""The entry points of DeepSpeed's stages, registered in ``pyproject.toml``. This module does not import deepspeed."""

from __future__ import annotations

from functools import partial

from drivetrain_strategies.deepspeed.strategy import DeepSpeedStrategy

stage_1 = partial(DeepSpeedStrategy, stage=1)
stage_2 = partial(DeepSpeedStrategy, stage=2)
stage_3 = partial(DeepSpeedStrategy, stage=3)
stage_1_offload = partial(DeepSpeedStrategy, stage=1, offload_optimizer="cpu")
stage_2_offload = partial(DeepSpeedStrategy, stage=2, offload_optimizer="cpu")
stage_3_offload = partial(DeepSpeedStrategy, stage=3, offload_optimizer="cpu", offload_parameters="cpu")
