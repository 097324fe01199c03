"""Adapts a sharded module to layers that are frozen or unfrozen during a run.

`fully_shard` reads ``requires_grad`` when it gathers a parameter, so only the dtypes derived in the first forward
must be recomputed. Changes that `fully_shard` cannot handle are refused.
"""

from __future__ import annotations

from torch import nn

from drivetrain.errors import ConfigurationError, listed
from drivetrain.strategies import changed_within_window_error
from drivetrain_strategies._manual_updates import GATHERED_UPDATE_REASON_AND_FIX, manual_update_error
from drivetrain_strategies.fsdp._gradients import Gradients
from drivetrain_strategies.fsdp._internals import Sharded


def adapt_to_trainable(module: nn.Module, sharded: Sharded, gradients: Gradients) -> None:
    """Adapt a sharded run to the current set of trainable parameters. Does not communicate.

    Args:
        module: the module, whose parameters are shards.
        sharded: the `Sharded` object of the module.
        gradients: the run's gradients. Unused parameters are determined again in the next window.

    Raises:
        ConfigurationError: a layer was created, or the trainable parameters of a unit have several dtypes.
    """
    known_ids = {id(parameter) for parameter in gradients.replicated} | {
        id(fsdp_param.sharded_param) for fsdp_param in sharded.parameters
    }
    created = [name for name, parameter in module.named_parameters() if id(parameter) not in known_ids]
    if created:
        raise ConfigurationError(
            f"A layer was created within a run, under FSDP: {listed(created)}.",
            "parameters are sharded before the first step. Gradients of new parameters would not be exchanged, and "
            "every rank would train its own copy.",
            "build the layer in configure_model and freeze it until it is needed, or use strategy='ddp'.",
        )
    try:
        sharded.trainable_changed()
    except AssertionError as error:
        raise ConfigurationError(
            "Within a run, the trainable parameters changed, and an FSDP unit now has trainable parameters of several "
            "dtypes.",
            f"the gradients of a unit are reduced together. torch says: {error}",
            "keep layers of another dtype frozen, or convert the model to one dtype before the run.",
        ) from error
    gradients.trainable_changed()


def refuse_changes_while_gathered(sharded: Sharded) -> None:
    """Refuse changes to ``requires_grad`` or to frozen values that were made while parameters were gathered.

    torch silently drops such changes.

    Raises:
        ConfigurationError: names the parameters.
    """
    updated = sharded.updated_while_gathered()
    if updated:
        sharded.reshard()
        raise manual_update_error(sharded.names_of(updated), "FSDPStrategy", GATHERED_UPDATE_REASON_AND_FIX)
    changed = sharded.toggled_while_gathered()
    if changed:
        sharded.reshard()
        raise changed_within_window_error(sharded.names_of(changed), "FSDPStrategy")
