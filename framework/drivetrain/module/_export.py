"""A module's forward, captured: as a program of torch.export, and translated to ONNX."""

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
from drivetrain.module._example_inputs import as_call, has_forward

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram

_PACKAGES = ("onnx", "onnxscript")
_OURS = {"model": "the module", "args": "input_sample", "kwargs": "input_sample=a dict", "f": "file_path"}
"""Arguments of `torch.onnx.export` that this makes itself, and what to give instead."""


def as_onnx(module: Any, file_path: Any, input_sample: Any, kwargs: dict[str, Any]) -> ONNXProgram:
    """Do what `TrainModule.to_onnx` says."""
    missing = [name for name in _PACKAGES if not is_installed(name)]
    if missing:
        raise ConfigurationError(
            f"to_onnx needs {listed(missing)}, which is not installed.",
            "torch.onnx translates with these packages.",
            "pip install onnx onnxscript (and onnxruntime to run the file).",
        )
    for name, instead in _OURS.items():
        if name in kwargs:
            raise ConfigurationError(
                f"to_onnx was given {name}=.", "it passes this to torch.onnx.export itself.", f"give {instead}."
            )
    if not kwargs.setdefault("dynamo", True):
        raise ConfigurationError(
            "to_onnx was given dynamo=False.",
            "that exporter goes through TorchScript, which PyTorch no longer develops.",
            "leave dynamo out, or call torch.onnx.export(module.eval(), ..., dynamo=False) yourself.",
        )
    if not (file_path is None or hasattr(file_path, "write")):
        file_path = _as_path(file_path)
    named_sizes: dict[str, Any] = {}
    kwargs["dynamic_shapes"] = _named_sizes(kwargs.get("dynamic_shapes"), named_sizes)
    external_data = kwargs.pop("external_data", None)
    kwargs.setdefault("verbose", False)
    with _tracing(module, "to_onnx", input_sample) as (args, named):
        program = torch.onnx.export(module, args, kwargs=named, **kwargs)
    assert program is not None  # TorchScript's exporter alone returns none
    _check_vary(program, named_sizes)
    if isinstance(file_path, str):
        _write(program, file_path, external_data)
    elif file_path is not None:
        program.save(file_path)
    return program


def _as_path(file_path: Any) -> str:
    """Return it as text; what is none, and a folder, are refused before the translation, which may take minutes."""
    path = file_path
    with suppress(TypeError):
        path = os.fspath(file_path)
    if not isinstance(path, str) or not path or path.endswith("/") or os.path.isdir(path):
        raise ConfigurationError(
            f"to_onnx(file_path={file_path!r}) could not be written.",
            "it is no name of a file.",
            'give one, such as "model.onnx", an fsspec URL, or a file that is open for writing bytes.',
        )
    return path


def _check_vary(program: ONNXProgram, named_sizes: dict[str, Any]) -> None:
    """Refuse a size that was to vary and does not: the translator settles it without a word."""
    vary = {str(size) for one in program.model.graph.inputs for size in one.shape or ()}
    settled = [name for name in named_sizes if name not in vary]
    if settled:
        shapes = {str(one.name): str(one.shape) for one in program.model.graph.inputs}
        raise ConfigurationError(
            f"to_onnx: {listed(settled)} cannot vary; the inputs are {shapes}.",
            "forward works for the sample's size alone, as a linear layer does for its number of features.",
            "leave it out of dynamic_shapes, or make forward work for any size.",
        )


def as_program(module: Any, input_sample: Any, kwargs: dict[str, Any]) -> ExportedProgram:
    """Do what `TrainModule.export` says."""
    kwargs["dynamic_shapes"] = _named_sizes(kwargs.get("dynamic_shapes"))
    with _tracing(module, "export", input_sample) as (args, named):
        return torch.export.export(module, args, named, **kwargs)


@contextmanager
def _tracing(module: Any, asked: str, sample: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Give the arguments to trace with; modes and generators are afterwards as before."""
    name = type(module).__name__
    if not has_forward(module):
        raise ConfigurationError(
            f"{name} has no forward, so {asked} has nothing to translate.",
            "what is exported is what module(x) computes.",
            f"write {name}.forward(self, x), the computation that the model does in service.",
        )
    if sample is None:
        sample = module.example_input_array
    if sample is None:
        raise ConfigurationError(
            f"{name}.{asked} has no input to trace with.",
            "a program is captured by following an example of the input through forward.",
            f"pass {asked}(input_sample=...), or set self.example_input_array in __init__: a tensor, a tuple of "
            "arguments, or a dict of arguments by name.",
        )
    _check_whole(module, asked)
    device = module.device
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device), sample)
    args, named = as_call(moved)
    with in_eval_mode(module), preserved_generators(device):
        yield args, named


def _check_whole(module: nn.Module, asked: str) -> None:
    """Refuse a module whose weights are not all here."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shards = [name for name, one in tensors if hasattr(one, "full_tensor") or hasattr(one, "ds_id")]
    on_meta = [name for name, one in tensors if one.is_meta]
    lazy = [name for name, one in tensors if isinstance(one, UninitializedParameter | UninitializedBuffer)]
    name = type(module).__name__
    if shards:
        raise ConfigurationError(
            f"{name}.{asked}: this rank holds shards of {listed(shards)}.",
            "a program holds whole weights, and the strategy has spread these over the ranks.",
            f"call it after the run, when the module is plain again, or on a checkpoint's: "
            f"{name}.load_from_checkpoint(path).{asked}(...).",
        )
    if on_meta or lazy:
        what = "lie on the meta device" if on_meta else "have no shape yet"
        raise ConfigurationError(
            f"{name}.{asked}: {listed(on_meta or lazy)} {what}.",
            "a program holds weights, and these have no values.",
            f"load them first, as {name}.load_from_checkpoint(path) does, or train the module.",
        )


def _named_sizes(shapes: Any, known: dict[str, Any] | None = None) -> Any:
    """Turn names of sizes into torch.export's dimensions, the same one for the same name."""
    known = {} if known is None else known
    if isinstance(shapes, str):
        if shapes not in known:
            known[shapes] = torch.export.Dim(shapes)
        return known[shapes]
    if isinstance(shapes, dict):
        return {key: _named_sizes(one, known) for key, one in shapes.items()}
    if isinstance(shapes, tuple | list):
        return type(shapes)(_named_sizes(one, known) for one in shapes)
    return shapes


def _write(program: ONNXProgram, path: str, external_data: bool | None) -> None:
    """Write it beside its place, and put it there: the second file, to which the first refers by name, comes first."""
    filesystem, root = filesystem_of(path)
    folder, _, name = root.replace(os.sep, "/").rpartition("/")
    try:
        if filesystem is None:
            Path(folder or ".").mkdir(parents=True, exist_ok=True)
        beside = (folder or ".") if filesystem is None else None
        with tempfile.TemporaryDirectory(prefix=".onnx-", dir=beside) as scratch:
            program.save(os.path.join(scratch, name), external_data=external_data)
            for written in sorted(os.listdir(scratch), key=lambda one: one == name):
                source, target = os.path.join(scratch, written), f"{folder}/{written}" if folder else written
                if filesystem is None:
                    os.replace(source, target)
                else:
                    filesystem.put_file(source, target)
    except OSError as error:
        raise CheckpointError(
            f"{path!r} could not be written: {error}.", "", "check the path, its permissions and the space."
        ) from error
