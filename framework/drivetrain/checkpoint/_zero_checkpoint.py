"""Reads folders written by DeepSpeed's ``save_checkpoint``, without executing code from them.

The layout of the flat partitions follows ``deepspeed.utils.zero_to_fp32``: at stages 1 and 2 the concatenated
partitions of a group hold its parameters in order; at stage 3 each parameter is split evenly over the ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint._untrusted import load_safely
from drivetrain.errors import CheckpointError

_STAGE_1_2_GROUPS, _STAGE_3_GROUPS = "single_partition_of_fp32_groups", "fp32_flat_groups"


def is_zero(folder: Path) -> bool:
    """Return whether a folder looks like a DeepSpeed checkpoint."""
    return (folder / "latest").is_file() or any(folder.glob("*_model_states.pt"))


def read_zero(folder: Path) -> dict[str, torch.Tensor]:
    """Return parameters (in float32 where ZeRO kept master weights) and buffers, by name.

    Raises:
        CheckpointError: files are missing or damaged, or the checkpoint was written with model parallelism.
    """
    step_folder = _step_folder(folder)
    model_states = [load_safely(path, _is_deepspeed_class) for path in _by_rank(step_folder.glob("*_model_states.pt"))]
    optimizer_states = [
        load_safely(path, _is_deepspeed_class)["optimizer_state_dict"]
        for path in _by_rank(step_folder.glob("*_optim_states.pt"))
    ]
    if not model_states:
        raise _unreadable(step_folder, "there are no *_model_states.pt files")
    if model_states[0].get("mp_world_size", 1) != 1:
        raise _unreadable(
            step_folder, f"it was written with model parallelism over {model_states[0]['mp_world_size']} ranks"
        )
    if len(optimizer_states) != model_states[0].get("dp_world_size", len(optimizer_states)):
        raise _unreadable(
            step_folder, f"{len(optimizer_states)} of {model_states[0]['dp_world_size']} *_optim_states.pt exist"
        )
    try:
        return _merge(model_states, optimizer_states)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(step_folder, f"{type(error).__name__}: {error}") from error


def _merge(
    model_states: Sequence[Mapping[str, Any]], optimizer_states: Sequence[Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    first_state = model_states[0]
    # Partitioned parameters are empty tensors in the model state.
    weights = {name: value for name, value in first_state["module"].items() if isinstance(value, torch.Tensor)}
    partitioned_names = {name for name, value in weights.items() if not value.numel()}
    shapes = first_state["param_shapes"]
    if optimizer_states and _STAGE_3_GROUPS in optimizer_states[0]:
        weights.update(_merge_sharded_groups(shapes, [state[_STAGE_3_GROUPS] for state in optimizer_states]))
        for name, shape in (first_state.get("frozen_param_shapes") or {}).items():
            fragments = [model["frozen_param_fragments"][name] for model in model_states]
            weights[name] = torch.cat(fragments)[: math.prod(shape)].view(shape)
    elif optimizer_states:
        weights.update(
            _merge_flat_groups(
                shapes,
                [state[_STAGE_1_2_GROUPS] for state in optimizer_states],
                optimizer_states[0].get("param_alignment_paddings"),
            )
        )
        weights.update(first_state.get("frozen_param_fragments") or {})
    for tied, name in dict(first_state.get("shared_params") or {}).items():
        weights[tied] = weights[name]
    unresolved_names = [name for name in partitioned_names if not weights[name].numel()]
    # A tied name that DeepSpeed did not record is left out, because the module ties the name to its parameter again.
    return {name: value for name, value in weights.items() if name not in unresolved_names}


def _merge_flat_groups(
    shapes: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[torch.Tensor]], paddings: Any
) -> dict[str, torch.Tensor]:
    tensors = {}
    for number, group in enumerate(shapes):
        flat = torch.cat([partition[number] for partition in groups])
        offset = 0
        for position, (name, shape) in enumerate(group.items()):
            count = math.prod(shape)
            tensors[name] = flat[offset : offset + count].view(shape)
            offset += count + (0 if paddings is None else paddings[number][position])
    return tensors


def _merge_sharded_groups(
    shapes: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    tensors = {}
    flats = [torch.cat(list(partition)) for partition in groups]
    offset = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        count = math.prod(shape)
        size = -(-count // len(flats))
        tensors[name] = torch.cat([flat[offset : offset + size] for flat in flats])[:count].view(shape)
        offset += size
    return tensors


def _step_folder(folder: Path) -> Path:
    latest = folder / "latest"
    if not latest.is_file():
        return folder
    name = latest.read_text().strip()
    if Path(name).name != name or not (folder / name).is_dir():
        raise _unreadable(folder, f"the file latest names {name!r}, which is not a folder in it")
    return folder / name


def _by_rank(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: [int(digits) for digits in re.findall(r"\d+", path.name)])


def _is_deepspeed_class(name: str) -> bool:
    return name.startswith("deepspeed.")


def _unreadable(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{str(folder)!r} cannot be read as a DeepSpeed checkpoint: {problem}.",
        "parameters are assembled from the files of all ranks.",
        "check that the files of all ranks exist, or run DeepSpeed's zero_to_fp32.py if you trust the files.",
    )
