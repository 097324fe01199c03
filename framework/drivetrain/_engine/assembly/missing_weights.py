"""Modules whose parameters have no values: a run has left them on the meta device, or their layers are lazy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from drivetrain._engine.run_summary import newest_checkpoint
from drivetrain.errors import ConfigurationError, listed
from drivetrain.strategies import replace_tensors

if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_core import RunCore

CHECKPOINT_ATTRIBUTE = "_checkpoint_of_missing_weights"
"""The attribute of a module for the path of the checkpoint that holds its weights, or "" if none was saved."""


def note_missing_weights(run: RunCore, written: str | None, opened: str, began_on_meta: bool) -> None:
    """Note the newest checkpoint of a run that has ended and left its module without weights.

    Args:
        run: the run.
        written: the path of the last checkpoint that the run has written, which may have been removed; None for none.
        opened: the path of the checkpoint that the run started from; "" for none.
        began_on_meta: whether the module had parameters without values before the run: from an earlier run, or because
            its user built it so.
    """
    noted = run.module.__dict__.get(CHECKPOINT_ATTRIBUTE) if began_on_meta else ""
    if noted is not None:
        run.module.__dict__[CHECKPOINT_ATTRIBUTE] = newest_checkpoint(run, written) or opened or noted


def refuse_missing_weights(module: nn.Module) -> None:
    """Refuse a module that a run has left without weights, if none were loaded since.

    Raises:
        ConfigurationError: the weights are missing. The error names the newest checkpoint.
    """
    path = module.__dict__.get(CHECKPOINT_ATTRIBUTE)
    if path is None or not any(parameter.is_meta for parameter in module.parameters()):
        return
    name = type(module).__name__
    raise ConfigurationError(
        f"{name} has no weights: its parameters are on the meta device.",
        "an earlier run sharded them over its ranks. It failed, or the parameters are above the strategy's "
        f"gather_limit. {f'The newest checkpoint is {path!r}.' if path else 'No checkpoint was saved.'}",
        f"build the module again and pass ckpt_path={path!r}, or call {name}.load_from_checkpoint({path!r})."
        if path
        else "build the module again, or load weights with load_state_dict(state, assign=True).",
    )


def give_storage(module: nn.Module, loads_weights: bool) -> None:
    """Prepare a module that a run has left without weights for the weights of a checkpoint.

    Args:
        module: the module.
        loads_weights: whether the run loads a checkpoint.

    Raises:
        ConfigurationError: the run loads no checkpoint, or the module has buffers without values.
    """
    if not loads_weights or any(buffer.is_meta for buffer in module.buffers()):
        refuse_missing_weights(module)
    elif CHECKPOINT_ATTRIBUTE in module.__dict__:
        missing = {id(each): torch.empty_like(each, device="cpu") for each in module.parameters() if each.is_meta}
        replace_tensors(module, missing)


def refuse_lazy_layers(module: nn.Module) -> NoReturn:
    """Raise the error for a module with uninitialised lazy layers.

    Raises:
        ConfigurationError: always. The error names the layers.
    """
    lazy = [
        f"{name or 'the module itself'} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if any(is_lazy(tensor) for tensor in (*layer._parameters.values(), *layer._buffers.values()))
    ]
    raise ConfigurationError(
        f"{type(module).__name__} has lazy layers that are not yet initialised: {listed(lazy)}.",
        "their parameters get a shape in the first forward; optimizers, strategies and checkpoints need it earlier.",
        "run one forward on an example batch under torch.no_grad(), before you call fit or in configure_model.",
    )
