"""Exports the forward of a module to ONNX or as a program of torch.export."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from drivetrain._module.example_inputs import example_arguments
from drivetrain._runtime.generators import preserved_generators
from drivetrain._runtime.module_modes import in_eval_mode
from drivetrain.errors import ConfigurationError, listed

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram


def export_onnx(module: Any, file_path: Any, input_sample: Any, kwargs: dict[str, Any]) -> ONNXProgram:
    """Export to ONNX; see `TrainModule.to_onnx`."""
    external_data = kwargs.pop("external_data", None)
    kwargs.setdefault("verbose", False)
    with _tracing(module, "to_onnx", input_sample) as (forward_args, forward_kwargs):
        program = torch.onnx.export(module, forward_args, kwargs=forward_kwargs, dynamo=True, **kwargs)
    assert program is not None  # Only TorchScript's exporter returns None.
    if isinstance(file_path, str | os.PathLike):
        Path(file_path).parent.mkdir(parents=True, exist_ok=True)
    if file_path is not None:
        program.save(file_path, external_data=external_data)
    return program


def export_program(module: Any, input_sample: Any, kwargs: dict[str, Any]) -> ExportedProgram:
    """Export by `torch.export`; see `TrainModule.export`."""
    # torch.onnx takes names of sizes as they are, but torch.export takes only dimensions.
    kwargs["dynamic_shapes"] = tree_map_only(str, torch.export.Dim, kwargs.get("dynamic_shapes"))
    with _tracing(module, "export", input_sample) as (forward_args, forward_kwargs):
        return torch.export.export(module, forward_args, forward_kwargs, **kwargs)


@contextmanager
def _tracing(module: Any, method: str, sample: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments to trace with, in eval mode. On exit, restore the modes of all layers and the generators."""
    if sample is None:
        sample = module.example_input_array
    if sample is None:
        raise ConfigurationError(
            f"{type(module).__name__}.{method} has no input to trace with.",
            "a program is captured by running forward on an example input.",
            f"pass {method}(input_sample=...), or set self.example_input_array in __init__: a tensor, a tuple of "
            "arguments, or a dict of arguments by name.",
        )
    _check_weights(module, method)
    device = module.device
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device), sample)
    forward_args, forward_kwargs = example_arguments(moved)
    with in_eval_mode(module), preserved_generators(device):
        yield forward_args, forward_kwargs


def _check_weights(module: nn.Module, method: str) -> None:
    """Check that this process holds all weights of the module.

    Raises:
        ConfigurationError: some weights are sharded, on the meta device or not initialised.
    """
    absent = [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id") or tensor.is_meta or is_lazy(tensor)
    ]
    if absent:
        name = type(module).__name__
        raise ConfigurationError(
            f"{name}.{method}: this process does not hold the whole of {listed(absent)}.",
            "a program contains whole weights, but a strategy has sharded these, or they have no values yet.",
            f"call {method} after the run, when the module is a plain nn.Module again, or load a checkpoint: "
            f"{name}.load_from_checkpoint(path).{method}(...).",
        )
