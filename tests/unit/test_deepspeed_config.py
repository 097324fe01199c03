"""DeepSpeed's configuration: the user's, completed from `Fit`, with contradictions refused (E-02, E-03, E-09)."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import RunSettings, strategy_by_name
from drivetrain_strategies import DeepSpeedStrategy
from drivetrain_strategies.deepspeed._config import TOP_LEVEL_KEYS, combine, resolve
from drivetrain_strategies.deepspeed._library import import_library
from drivetrain_strategies.deepspeed._precision import DeepSpeedPrecision

RUN = RunSettings("fit", accumulate_grad_batches=4, gradient_clip_val=0.5, batch_size=8)


def _resolved(config: Any, zero: Any = None, run: RunSettings = RUN, precision: str = "32-true") -> Any:
    return resolve(combine(config, {"zero_optimization": zero or {}}), run, precision, ranks=2)


def test_missing_values_come_from_fit() -> None:  # E-01, E-03, E-09
    assert _resolved({}) == {
        "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2},
    }
    assert _resolved({}, run=RunSettings())["gradient_clipping"] == 0.0
    half = _resolved({}, precision="bf16-mixed")
    assert (half["bf16"], half["data_types"]) == ({"enabled": True}, {"grad_accum_dtype": "fp32"})
    assert half["communication_data_type"] == "fp32"
    assert _resolved({"bfloat16": {"enabled": True}}, precision="bf16-mixed") == half
    fp16 = {"loss_scale": 0, "initial_scale_power": 8}
    like_torch = {"hysteresis": 1, "loss_scale_window": 2000}  # B-06
    assert _resolved({"fp16": fp16}, precision="16-mixed")["fp16"] == {"enabled": True, **fp16, **like_torch}
    assert _resolved({"fp16": {"hysteresis": 2}}, precision="16-mixed")["fp16"]["hysteresis"] == 2


def test_values_that_match_those_of_fit_are_replaced_in_a_copy() -> None:  # E-03
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    zero = {"stage": 3, "sub_group_size": 10}
    config: Any = {**sizes, "gradient_clipping": 0.5, "zero_optimization": zero, "bf16": {"enabled": False}}
    before = copy.deepcopy(config)
    resolved = _resolved(config, {**zero, "overlap_comm": False})
    assert (resolved["train_batch_size"], resolved["gradient_accumulation_steps"]) == (16, 1)
    assert resolved["zero_optimization"] == {**zero, "overlap_comm": False}
    resolved["zero_optimization"]["stage"] = 1
    assert config == before
    # Clipping of the config is used without one of Fit.
    assert _resolved({"gradient_clipping": 2.0}, run=RunSettings(batch_size=8))["gradient_clipping"] == 2.0


def test_auto_is_filled() -> None:  # E-03
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    enabled = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    resolved = _resolved({**dict.fromkeys(sizes, "auto"), **enabled, "zero_optimization": zero}, precision="bf16-mixed")
    assert '"auto"' not in json.dumps(resolved)
    assert resolved["zero_optimization"] == {"stage": 3}
    assert (resolved["bf16"], resolved["fp16"]) == ({"enabled": True}, {"enabled": False})
    with pytest.raises(ConfigurationError, match=r"optimizer\.params\.lr is 'auto'"):
        _resolved({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})


def offload(device: str) -> dict[str, Any]:
    return {"offload_optimizer": {"device": device}}


BF16 = {"precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("config", "others", "parts"),
    [
        ({"gradient_accumulation_steps": 2}, {}, ("gradient_accumulation_steps=2", "batches=4")),
        ({"train_micro_batch_size_per_gpu": 4}, {}, ("gpu=4", "batch_size=8")),
        ({"train_batch_size": 16}, {}, ("train_batch_size=16", "x 2 ranks")),
        ({"gradient_clipping": 1.0}, {}, ("gradient_clipping=1.0", "gradient_clip_val=0.5")),
        ({"bf16": {"enabled": True}}, {}, ("bf16.enabled=True", "precision='32-true'")),
        ({"fp16": {"enabled": True}}, BF16, ("fp16.enabled=True", "precision='bf16-mixed'")),
        ({"bf16": {"enabled": False}}, BF16, ("bf16.enabled=False", "precision='bf16-mixed'")),
        ({"torch_autocast": {"enabled": True}}, {}, ("torch_autocast", "precision='32-true'")),
        ({"zero_optimization": {"stage": 1}}, {"zero": {"stage": 2}}, ("stage=1", "stage=2")),
        ({"zero_optimization": offload("nvme")}, {"zero": offload("cpu")}, ("optimizer.device='nvme'", "'cpu'")),
        ({"zero_optimisation": {"stage": 1}}, {}, ("zero_optimisation", "'zero_optimization'")),
    ],
)
def test_a_contradiction_names_both_sides(config: Any, others: Any, parts: tuple[str, str]) -> None:  # E-03, E-09
    with pytest.raises(ConfigurationError) as error:
        _resolved(config, **others)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_config_from_a_file(tmp_path: Path) -> None:  # E-03
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 3}}')
    assert DeepSpeedStrategy(config=path).stage == 3
    assert DeepSpeedStrategy(config=str(path)).collective_forward
    path.write_text("{not JSON")
    with pytest.raises(ConfigurationError, match=r"zero\.json'\) cannot be read"):
        DeepSpeedStrategy(config=path)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"stage": 4}, "stage=4"),
        ({"stage": 0}, "Stage 0 would be plain DDP"),
        ({"offload_optimizer": "nvme", "stage": 3}, "without nvme_path"),
        ({"offload_optimizer": "nvme", "nvme_path": "/tmp"}, "offload_optimizer='nvme' at stage 2"),
        ({"offload_parameters": "cpu"}, "offload_parameters='cpu' and offload_optimizer='none' at stage 2"),
        ({"config": {"zero_optimization": {"round_robin_gradients": True}}}, "round_robin_gradients"),
        ({"activation_policy": "fulll"}, "activation_policy='fulll'"),
        ({"config": {"zero_optimization": True}}, "zero_optimization=True"),
        ({"offload_param": {"device": "cpu"}, "offload_parameters": "none"}, "offload_param.device='cpu' contradicts"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], part: str) -> None:  # G-06: at construction
    with pytest.raises(ConfigurationError) as error:
        DeepSpeedStrategy(**options)
    assert part in str(error.value)


def test_an_offload_has_deepspeeds_name_too_and_outside_of_a_run_there_is_no_engine() -> None:
    strategy: Any = DeepSpeedStrategy(stage=3, offload_param={"device": "cpu"}, offload_parameters=None)
    assert strategy._config["zero_optimization"]["offload_param"] == {"device": "cpu"}
    with pytest.raises(ConfigurationError, match="is not running"), strategy.gathered():
        pass


def test_the_keys_are_those_that_deepspeed_reads() -> None:
    import_library()
    from deepspeed.runtime import config as theirs

    class ReadKeys(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            read.add(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

        def __copy__(self) -> ReadKeys:
            return self

    read: set[str] = set()
    theirs.DeepSpeedConfig(ReadKeys(train_batch_size=1, train_micro_batch_size_per_gpu=1))
    assert read - set(theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= TOP_LEVEL_KEYS
    # which deepspeed.initialize reads
    assert TOP_LEVEL_KEYS - read == {"data_parallel_size", "sequence_parallel_size"}


@pytest.mark.parametrize(("name", "stage"), [("", 2), ("_stage_1", 1), ("_stage_2", 2), ("_stage_3", 3)])
def test_every_stage_has_its_names(name: str, stage: int) -> None:
    with_offload = {"offload_optimizer", "offload_param"} if stage == 3 else {"offload_optimizer"}
    for full, expected in ((f"deepspeed{name}", set()), (f"deepspeed{name}_offload", with_offload)):
        strategy = strategy_by_name(full)
        assert isinstance(strategy, DeepSpeedStrategy)
        assert strategy.stage == stage
        assert strategy._config["zero_optimization"].keys() & {"offload_optimizer", "offload_param"} == expected


def test_a_missing_or_untested_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # E-07
    for version in ("0.16.4", "0.20.0"):
        info = tmp_path / version / f"deepspeed-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / version)
        installed = f"deepspeed {version} is installed, but >=0.19.8,<0.20 is required"
        with pytest.raises(ConfigurationError, match=installed):
            DeepSpeedStrategy()
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigurationError, match=r"(?s)is not installed.*pip install 'drivetrain\[deepspeed\]'"):
        DeepSpeedStrategy()


def test_settings_do_not_import_deepspeed_and_the_import_leaves_no_variable_and_prints_nothing() -> None:
    # H-02, A-01, E-12
    code = """
import os, sys
before = dict(os.environ)
from drivetrain import Fit
from drivetrain_strategies import DeepSpeedStrategy
Fit(strategy=DeepSpeedStrategy(stage=3)); Fit(strategy='deepspeed')
assert 'deepspeed' not in sys.modules
assert dict(os.environ) == before
from drivetrain_strategies.deepspeed._library import import_library
import_library()
assert dict(os.environ) == before, set(os.environ) ^ set(before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_each_stage_advises_the_next_when_out_of_memory() -> None:  # K-02
    advice = {stage: DeepSpeedStrategy(stage).memory_advice(torch.nn.Linear(1, 1)) for stage in (1, 2, 3)}
    first = [texts[0].partition(":")[0] for texts in advice.values()]
    assert first == [f"strategy='deepspeed_stage_{stage}'" for stage in ("2", "3", "3_offload")]
    assert "DeepSpeedStrategy(activation_checkpointing=[Block])" in advice[2][1]
    cpu = torch.device("cpu")
    assert not DeepSpeedPrecision("bf16-mixed", cpu).memory_advice()  # "bf16-true" would be refused
    assert "bf16-mixed" in DeepSpeedPrecision("32-true", cpu).memory_advice()[0]
