"""Exports the forward of a module to ONNX or as a program of torch.export."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.onnx import OnnxExporterError
from torch.utils._pytree import tree_map_only

from drivetrain._module.example_inputs import example_arguments, has_forward
from drivetrain._runtime.generators import preserved_generators
from drivetrain._runtime.lazy_names import is_installed
from drivetrain._runtime.module_modes import in_eval_mode
from drivetrain.errors import CheckpointError, ConfigurationError, listed

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram

_REQUIRED_PACKAGES = ("onnx", "onnxscript")


def export_onnx(module: Any, file_path: Any, input_sample: Any, kwargs: dict[str, Any]) -> ONNXProgram:
    """Export to ONNX; see `TrainModule.to_onnx`."""
    missing = [name for name in _REQUIRED_PACKAGES if not is_installed(name)]
    if missing:
        raise ConfigurationError(
            f"to_onnx needs {listed(missing)}, which is not installed.",
            "torch.onnx uses these packages.",
            "pip install onnx onnxscript (and onnxruntime to run the file).",
        )
    if not kwargs.setdefault("dynamo", True):
        raise ConfigurationError(
            "to_onnx got dynamo=False.",
            "the exporter without dynamo uses TorchScript, which PyTorch no longer develops.",
            "omit dynamo, or call torch.onnx.export(module.eval(), ..., dynamo=False) yourself.",
        )
    if not (file_path is None or hasattr(file_path, "write")):
        file_path = _validate_path(file_path)
    external_data = kwargs.pop("external_data", None)
    kwargs.setdefault("verbose", False)
    with _tracing(module, "to_onnx", input_sample) as (forward_args, forward_kwargs):
        try:
            program = torch.onnx.export(module, forward_args, kwargs=forward_kwargs, **kwargs)
        except OnnxExporterError as error:
            raise ConfigurationError(
                f"to_onnx: torch.onnx cannot export {type(module).__name__}.forward: {error.__cause__ or error}",
                "forward contains what the exporter cannot translate, or dynamic_shapes names a size that it fixes.",
                "omit the size from dynamic_shapes, or change forward as torch's message says.",
            ) from error
    assert program is not None  # Only TorchScript's exporter returns None.
    if file_path is None:
        return program
    try:
        if isinstance(file_path, str):
            Path(file_path).parent.mkdir(parents=True, exist_ok=True)
        program.save(file_path, external_data=external_data)
    except OSError as error:
        raise CheckpointError(
            f"{file_path!r} could not be written: {error}.", "", "check the path, the permissions and the free space."
        ) from error
    return program


def _validate_path(file_path: Any) -> str:
    """Return the path as text.

    The path is checked before the export, because an export may take minutes.

    Raises:
        ConfigurationError: the path is a folder or a URL, or not the name of a file.
    """
    path = file_path
    with suppress(TypeError):
        path = os.fspath(file_path)
    if not isinstance(path, str) or "://" in path or os.path.basename(path) == "" or os.path.isdir(path):
        raise ConfigurationError(
            f"to_onnx(file_path={file_path!r}) cannot be written.",
            "the value is not the name of a local file.",
            'pass a file name, such as "model.onnx", or a file that is open for writing bytes.',
        )
    return path


def export_program(module: Any, input_sample: Any, kwargs: dict[str, Any]) -> ExportedProgram:
    """Export by `torch.export`; see `TrainModule.export`."""
    # torch.onnx takes names of sizes as they are, but torch.export takes only dimensions.
    kwargs["dynamic_shapes"] = tree_map_only(str, torch.export.Dim, kwargs.get("dynamic_shapes"))
    with _tracing(module, "export", input_sample) as (forward_args, forward_kwargs):
        return torch.export.export(module, forward_args, forward_kwargs, **kwargs)


@contextmanager
def _tracing(module: Any, method: str, sample: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments to trace with, in eval mode. On exit, restore the modes of all layers and the generators."""
    name = type(module).__name__
    if not has_forward(module):
        raise ConfigurationError(
            f"{name} has no forward, so {method} has nothing to export.",
            f"{method} exports what module(x) computes.",
            f"implement {name}.forward(self, x) with the computation for inference.",
        )
    if sample is None:
        sample = module.example_input_array
    if sample is None:
        raise ConfigurationError(
            f"{name}.{method} has no input to trace with.",
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
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shards = [name for name, tensor in tensors if hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    lazy = [name for name, tensor in tensors if isinstance(tensor, UninitializedParameter | UninitializedBuffer)]
    name = type(module).__name__
    if shards:
        raise ConfigurationError(
            f"{name}.{method}: this rank holds shards of {listed(shards)}.",
            "a program contains whole weights, but the strategy has sharded the weights over the ranks.",
            f"call {method} after the run, when the module is a plain nn.Module again, or load a checkpoint: "
            f"{name}.load_from_checkpoint(path).{method}(...).",
        )
    if on_meta or lazy:
        state = "are on the meta device" if on_meta else "have no shape yet"
        raise ConfigurationError(
            f"{name}.{method}: {listed(on_meta or lazy)} {state}.",
            "a program contains weights, but these weights have no values yet.",
            f"load the weights first, as {name}.load_from_checkpoint(path) does, or train the module.",
        )
