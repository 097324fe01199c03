"""Exports the forward of a module to ONNX or as a program of torch.export."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_map_only

from drivetrain._runtime.generators import preserved_generators
from drivetrain._runtime.lazy_names import is_installed
from drivetrain._runtime.module_modes import in_eval_mode
from drivetrain.checkpoint._format.storage import filesystem_of
from drivetrain.errors import CheckpointError, ConfigurationError, listed
from drivetrain.module._example_inputs import example_arguments, has_forward

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram

_REQUIRED_PACKAGES = ("onnx", "onnxscript")
_RESERVED_ARGUMENTS = {"model": "the module", "args": "input_sample", "kwargs": "input_sample=a dict", "f": "file_path"}
"""Arguments of `torch.onnx.export` that `to_onnx` sets itself, and what to pass instead."""


def export_onnx(module: Any, file_path: Any, input_sample: Any, kwargs: dict[str, Any]) -> ONNXProgram:
    """Export to ONNX; see `TrainModule.to_onnx`."""
    missing = [name for name in _REQUIRED_PACKAGES if not is_installed(name)]
    if missing:
        raise ConfigurationError(
            f"to_onnx needs {listed(missing)}, which is not installed.",
            "torch.onnx uses these packages.",
            "pip install onnx onnxscript (and onnxruntime to run the file).",
        )
    for name, instead in _RESERVED_ARGUMENTS.items():
        if name in kwargs:
            raise ConfigurationError(
                f"to_onnx got {name}=.", "to_onnx itself passes this argument to torch.onnx.export.", f"pass {instead}."
            )
    if not kwargs.setdefault("dynamo", True):
        raise ConfigurationError(
            "to_onnx got dynamo=False.",
            "the exporter without dynamo uses TorchScript, which PyTorch no longer develops.",
            "omit dynamo, or call torch.onnx.export(module.eval(), ..., dynamo=False) yourself.",
        )
    if not (file_path is None or hasattr(file_path, "write")):
        file_path = _validate_path(file_path)
    dimensions: dict[str, Any] = {}
    kwargs["dynamic_shapes"] = _resolve_dynamic_shapes(kwargs.get("dynamic_shapes"), dimensions)
    external_data = kwargs.pop("external_data", None)
    kwargs.setdefault("verbose", False)
    with _tracing(module, "to_onnx", input_sample) as (forward_args, forward_kwargs):
        program = torch.onnx.export(module, forward_args, kwargs=forward_kwargs, **kwargs)
    assert program is not None  # Only TorchScript's exporter returns None.
    _check_dynamic_sizes(program, dimensions)
    if isinstance(file_path, str):
        _write_atomically(program, file_path, external_data)
    elif file_path is not None:
        program.save(file_path)
    return program


def _validate_path(file_path: Any) -> str:
    """Return the path as text.

    The path is checked before the export, because an export may take minutes.

    Raises:
        ConfigurationError: the path is a folder, or not the name of a file.
    """
    path = file_path
    with suppress(TypeError):
        path = os.fspath(file_path)
    if not isinstance(path, str) or not path or path.endswith("/") or os.path.isdir(path):
        raise ConfigurationError(
            f"to_onnx(file_path={file_path!r}) cannot be written.",
            "the value is not the name of a file.",
            'pass a file name, such as "model.onnx", an fsspec URL, or a file that is open for writing bytes.',
        )
    return path


def _check_dynamic_sizes(program: ONNXProgram, dimensions: dict[str, Any]) -> None:
    """Check that all sizes named in ``dynamic_shapes`` are dynamic, since the exporter may silently fix a size."""
    dynamic = {str(size) for value in program.model.graph.inputs for size in value.shape or ()}
    fixed = [name for name in dimensions if name not in dynamic]
    if fixed:
        shapes = {str(value.name): str(value.shape) for value in program.model.graph.inputs}
        raise ConfigurationError(
            f"to_onnx: {listed(fixed)} cannot vary, and the inputs have the shapes {shapes}.",
            "forward supports only the size of the sample, as a linear layer supports only one number of features.",
            "omit the size from dynamic_shapes, or make forward work for any size.",
        )


def export_program(module: Any, input_sample: Any, kwargs: dict[str, Any]) -> ExportedProgram:
    """Export by `torch.export`; see `TrainModule.export`."""
    kwargs["dynamic_shapes"] = _resolve_dynamic_shapes(kwargs.get("dynamic_shapes"))
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


def _resolve_dynamic_shapes(shapes: Any, dimensions: dict[str, Any] | None = None) -> Any:
    """Replace each name of a size by a dimension of torch.export. Equal names are replaced by the same dimension."""
    dimensions = {} if dimensions is None else dimensions
    if isinstance(shapes, str):
        if shapes not in dimensions:
            dimensions[shapes] = torch.export.Dim(shapes)
        return dimensions[shapes]
    if isinstance(shapes, dict):
        return {key: _resolve_dynamic_shapes(shape, dimensions) for key, shape in shapes.items()}
    if isinstance(shapes, tuple | list):
        return type(shapes)(_resolve_dynamic_shapes(shape, dimensions) for shape in shapes)
    return shapes


def _write_atomically(program: ONNXProgram, path: str, external_data: bool | None) -> None:
    """Write the program to a temporary folder next to ``path``, then move its files into place.

    A file with external weights is moved first, because the program's file refers to it.
    """
    filesystem, root = filesystem_of(path)
    folder, _, name = root.replace(os.sep, "/").rpartition("/")
    try:
        if filesystem is None:
            Path(folder or ".").mkdir(parents=True, exist_ok=True)
        scratch_parent = (folder or ".") if filesystem is None else None
        with tempfile.TemporaryDirectory(prefix=".onnx-", dir=scratch_parent) as scratch:
            program.save(os.path.join(scratch, name), external_data=external_data)
            for written in sorted(os.listdir(scratch), key=lambda file: file == name):
                source, target = os.path.join(scratch, written), f"{folder}/{written}" if folder else written
                if filesystem is None:
                    os.replace(source, target)
                else:
                    filesystem.put_file(source, target)
    except OSError as error:
        raise CheckpointError(
            f"{path!r} could not be written: {error}.", "", "check the path, the permissions and the free space."
        ) from error
