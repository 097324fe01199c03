"""Converts weights from and to other libraries' formats, without executing code from their files."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain._config.secret_values import SecretFilter
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._format import CheckpointMetadata, StateToSave, save
from drivetrain._format.documents import encode
from drivetrain.checkpoint._hugging_face import write_pretrained
from drivetrain.checkpoint._untrusted import Placeholder, load_safely
from drivetrain.checkpoint.averaged_weights import announce_choice, check_averaged
from drivetrain.errors import CheckpointError

_LIGHTNING_TRAINED = "current_model_state"
"""Key of the trained weights in a file with Lightning's `WeightAveraging`, whose ``state_dict`` has the averages."""
_KEYS_OF_WEIGHTS = ("state_dict", "model_state_dict", "model", "module")  # of mappings in other libraries' files

logger = logging.getLogger("drivetrain")


def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    prefix: str = "",
    to: str = "checkpoint",
    averaged: bool | None = None,
) -> str:
    """Convert weights of another library to a checkpoint, or a checkpoint to the Hugging Face layout.

    With ``to="checkpoint"`` the result is a weights-only checkpoint for `TrainModule.load_from_checkpoint`. Supported
    inputs: a Lightning ``.ckpt``, with those hyper-parameters that are JSON-able and not secret; a
    ``torch.save`` file that holds a state dict; and ``.safetensors`` files.

    With ``to="hf"`` the result is a folder as ``save_pretrained`` writes it, for ``from_pretrained``. The input is a
    checkpoint of a module that has a Hugging Face model as an attribute; the model's configuration comes from the
    checkpoint. Tensors have the names that they have in the model, and a tied tensor is stored under one name. For a
    model with PEFT adapters, call ``save_pretrained`` of the loaded module's model.

    Args:
        path: a local file; with ``to="hf"`` a checkpoint's path or URL.
        out: the path or URL of the checkpoint or folder to write.
        prefix: keep only names with this prefix and strip it. The keys of nested dicts that lead to all weights, such
            as "model" in ``{"model": state}``, are stripped anyway. With ``to="hf"`` the model's name in the module,
            which is detected if there is only one model.
        to: "checkpoint" or "hf".
        averaged: True for the averages of the weights, False for the trained weights. None means those that the run
            evaluated with, which in Lightning are the averages if its callback ``WeightAveraging`` saved some.

    Returns:
        ``out`` as text.

    Raises:
        CheckpointError: the input has an unsupported format, holds more than tensors and plain values, or lacks
            weights or the averages; the model to convert is ambiguous; or ``out`` already holds weights.
    """
    if to == "hf":
        return write_pretrained(path, out, prefix, averaged)
    if to != "checkpoint":
        raise CheckpointError(
            f"convert(to={to!r}) is not supported.",
            'convert writes a checkpoint, or with to="hf" the layout of save_pretrained.',
            'give to="checkpoint" or to="hf".',
        )
    check_averaged(averaged)
    weights, hyper_parameters, nest = _read_other_format(Path(path), averaged)
    if weights and len(nest) > len(prefix) and nest.startswith(prefix):
        logger.warning("The names of all weights in %r begin with %r, which is taken off.", os.fspath(path), nest)
        prefix = nest
    if prefix:
        weights = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not weights:
        raise CheckpointError(
            f"{os.fspath(path)!r} holds no tensors" + (f" whose names begin with {prefix!r}." if prefix else "."),
            "there is nothing to convert.",
            "check the path and the prefix.",
        )
    weights, aliases = _find_aliases(weights)
    hyper_parameters, left_out = SecretFilter().take_out(hyper_parameters)
    metadata = CheckpointMetadata(hyper_parameters=hyper_parameters, left_out=tuple(left_out), weights_only=True)
    save(os.fspath(out), StateToSave(weights, metadata, aliases), LocalControl())
    return os.fspath(out)


def _read_other_format(path: Path, averaged: bool | None) -> tuple[dict[str, torch.Tensor], dict[str, Any], str]:
    """Return the weights, the hyper-parameters, and what stands before the name of every weight in its module."""
    if path.is_dir():
        raise CheckpointError(
            f"{str(path)!r} is a folder of an unknown format.",
            "convert reads files. The shards in a folder of another library must first be merged into one file.",
            "for torch.distributed.checkpoint: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER "
            "FILE; for DeepSpeed: the script zero_to_fp32.py in the folder. Both unpickle, so use them only for files "
            'that you trust. to="hf" (--to hf) converts a checkpoint of drivetrain for from_pretrained.',
        )
    if not path.exists():
        raise CheckpointError(f"{str(path)!r} does not exist.", "", "check the path.")
    if path.suffix == ".safetensors":
        if averaged:
            raise _no_averages_error(path)
        from safetensors.torch import load_file

        return load_file(path), {}, ""
    document = load_safely(path)
    state = document.get("state_dict", document)
    trained = document.get(_LIGHTNING_TRAINED)
    if trained is not None:
        uses_averages = averaged is not False
        announce_choice(str(path), uses_averages, is_default=averaged is None)
        state = state if uses_averages else trained
    elif averaged:
        raise _no_averages_error(path)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{str(path)!r} holds a {type(state).__name__} where its state_dict should be.",
            "weights are read as a mapping of names to tensors.",
            "check that this is the checkpoint and not another file of the run.",
        )
    state, nest = _nested_weights(state)
    unreadable_names = [str(name) for name, value in state.items() if isinstance(value, Placeholder)]
    if unreadable_names:
        raise CheckpointError(
            f"{str(path)!r} holds weights that are not plain tensors: {', '.join(unreadable_names)}.",
            "turning them into tensors would execute code of their classes.",
            "load the file in a program that defines the classes, and save plain tensors.",
        )
    tensors = {f"{nest}{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if "pytorch-lightning_version" in document:
        nest = ""
    return tensors, _json_hyper_parameters(document.get("hyper_parameters")), nest


def _nested_weights(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the mapping of names to tensors in a document, and the dotted keys that lead to it.

    A mapping without tensors is searched for a mapping under a key that usually holds weights, or for its only mapping.
    """
    if not any(isinstance(value, torch.Tensor) for value in document.values()):
        mappings = [key for key, value in document.items() if isinstance(value, Mapping)]
        known = [key for key in _KEYS_OF_WEIGHTS if key in mappings]
        if known or len(mappings) == 1:
            key = (known or mappings)[0]
            weights, nest = _nested_weights(document[key])
            return weights, f"{key}.{nest}"
    return document, ""


def _no_averages_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} holds no averages of its weights.",
        "of other libraries' formats, convert knows only the averages that Lightning's WeightAveraging saves.",
        "leave averaged out.",
    )


def _json_hyper_parameters(hyper_parameters: Any) -> dict[str, Any]:
    """Return the hyper-parameters that JSON can represent, and warn about each other hyper-parameter."""
    json_values = {}
    for name, value in dict(hyper_parameters or {}).items():
        tensors: dict[str, Any] = {}
        try:
            encode({name: value}, tensors)
        except CheckpointError:
            tensors[name] = value
        if tensors:
            warnings.warn(f"The hyper-parameter {name!r} cannot be stored as JSON and is left out.", stacklevel=4)
        else:
            json_values[str(name)] = value
    return json_values


def _find_aliases(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the weights, and the aliases of names that share one tensor in the file."""
    first_names: dict[Any, str] = {}
    aliases = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        first_name = first_names.setdefault(key, name) if tensor.numel() else name
        if first_name != name:
            aliases[name] = first_name
    return dict(weights), aliases
