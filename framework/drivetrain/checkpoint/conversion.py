"""Weights from and for other libraries, the former read without running anything that they wrote."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain._config.secret_values import SecretFilter
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.checkpoint._dcp_checkpoint import is_dcp, read_dcp
from drivetrain.checkpoint._format import Contents, Facts, save
from drivetrain.checkpoint._format.documents import encode
from drivetrain.checkpoint._hugging_face import write_pretrained
from drivetrain.checkpoint._untrusted import Record, load_safely
from drivetrain.checkpoint._zero_checkpoint import is_zero, read_zero
from drivetrain.errors import CheckpointError


def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    prefix: str = "",
    to: str = "checkpoint",
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    max_shard_size: int | str = "50GB",
) -> str:
    """Write a checkpoint that holds the weights of another library's, or another library's of a checkpoint.

    With ``to="checkpoint"`` the former, for `TrainModule.load_from_checkpoint`.

    Known are: a Lightning ``.ckpt``, whose hyper-parameters come along where they are JSON-able and no secrets; a file
    of ``torch.save`` that holds a state dict; ``.safetensors`` files; folders of ``torch.distributed.checkpoint``; and
    folders that DeepSpeed's ``save_checkpoint`` wrote at any ZeRO stage, without model parallelism.

    With ``to="hf"`` the latter: a folder as ``save_pretrained`` of Hugging Face's libraries writes it, which
    ``from_pretrained`` opens, from a checkpoint of a module that has such a model as an attribute. Its configuration
    comes from the checkpoint. Names are the model's own; of tied ones one is stored. Of a model with PEFT's adapters
    these alone are written, as there.

    Args:
        path: a local file or folder; with ``to="hf"`` a checkpoint's path or URL.
        out: the path or URL of the checkpoint or the folder.
        prefix: take names that begin so, and leave it out: ``"model."``, for one, under which DCP keeps what was given
            to it as ``{"model": ...}``. With ``to="hf"`` the model's name in the module, found by itself if there is
            one.
        to: "checkpoint" or "hf".
        config: with ``to="hf"``: a ``config.json``, its folder or what it holds, in place of the checkpoint's.
        max_shard_size: with ``to="hf"``: bytes of a file, or text such as ``"5GB"``, above which there are several with
            an index.

    Returns:
        ``out`` as text.

    Raises:
        CheckpointError: it is nothing of these, or holds more than tensors and plain values; or it is not known which
            model is meant, its weights are not all there, or ``out`` has others in it.
    """
    if to == "hf":
        return write_pretrained(path, out, prefix, config, max_shard_size)
    if to != "checkpoint" or config is not None:
        raise CheckpointError(
            f"convert(to={to!r}, config={config!r})",
            'it writes a checkpoint, or with to="hf" the layout of save_pretrained, which needs a configuration.',
            'give to="checkpoint" without config, or to="hf".',
        )
    weights, hyper_parameters = _read(Path(path))
    if prefix:
        weights = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not weights:
        raise CheckpointError(
            f"{os.fspath(path)!r} holds no tensors" + (f" whose names begin with {prefix!r}." if prefix else "."),
            "there is nothing to convert.",
            "check the path and the prefix.",
        )
    weights, aliases = _untied(weights)
    hyper_parameters, left_out = SecretFilter().take_out(hyper_parameters)
    facts = Facts(hyper_parameters=hyper_parameters, left_out=tuple(left_out), weights_only=True)
    save(os.fspath(out), Contents(weights, facts, aliases), LocalControl())
    return os.fspath(out)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    if path.is_dir():
        if is_dcp(path):
            return read_dcp(path), {}
        if is_zero(path):
            return read_zero(path), {}
        raise CheckpointError(
            f"{str(path)!r} is a folder of an unknown kind.",
            "known are those of torch.distributed.checkpoint (with a file .metadata) and of DeepSpeed (with a file "
            "latest, or with files *_model_states.pt).",
            'check the path; to="hf" (--to hf) converts a checkpoint of drivetrain for from_pretrained.',
        )
    if not path.exists():
        raise CheckpointError(
            f"There is nothing at {str(path)!r}.", "no file or folder has this name.", "check the path."
        )
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path), {}
    document = load_safely(path, known=lambda name: True)  # whose objects nobody asks for may be of any class
    state = document.get("state_dict", document)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{str(path)!r} holds a {type(state).__name__} where its state_dict should be.",
            "weights are read from names and their tensors.",
            "check that this is the checkpoint, and not something saved beside it.",
        )
    unknown = [str(name) for name, value in state.items() if isinstance(value, Record)]
    if unknown:
        raise CheckpointError(
            f"{str(path)!r} holds weights of classes that are not torch's own: {', '.join(unknown)}.",
            "what would make tensors of them is code, and none is run.",
            "load it where the classes are known, and save plain tensors.",
        )
    tensors = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, _kept(document.get("hyper_parameters"))


def _kept(hyper_parameters: Any) -> dict[str, Any]:
    kept = {}
    for name, value in dict(hyper_parameters or {}).items():
        aside: dict[str, Any] = {}
        try:
            encode({name: value}, aside)
        except CheckpointError:
            aside[name] = value
        if aside:
            warnings.warn(f"The hyper-parameter {name!r} is no JSON and is left out.", stacklevel=4)
        else:
            kept[str(name)] = value
    return kept


def _untied(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Find names of one and the same tensor, which the file held once."""
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        known = first.setdefault(key, name) if tensor.numel() else name
        if known != name:
            aliases[name] = known
    return dict(weights), aliases
