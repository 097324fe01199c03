"""What becomes of a sharded module whose layers are frozen or unfrozen in mid-run.

`fully_shard` looks at ``requires_grad`` as it gathers a parameter, and so needs little help: what it derived from it at
the first forward is derived anew. What it cannot take is refused.
"""

from __future__ import annotations

from torch import nn

from drivetrain.errors import ConfigurationError, listed
from drivetrain.strategies import changed_within_window
from drivetrain_strategies._manual_updates import GATHERED, moved_by_hand
from drivetrain_strategies.fsdp._gradients import Gradients
from drivetrain_strategies.fsdp._internals import Sharded


def adapt(module: nn.Module, sharded: Sharded, gradients: Gradients) -> None:
    """Bring everything up to date with what trains now. Talks to nobody.

    Args:
        module: holding its shards.
        sharded: the same as `fully_shard` left it.
        gradients: know what stays whole; decide anew, in the next window, what is unused.

    Raises:
        ConfigurationError: a layer was created, or a unit now trains parameters of several dtypes.
    """
    held = {id(one) for one in gradients.whole} | {id(one.sharded_param) for one in sharded.parameters}
    created = [name for name, one in module.named_parameters() if id(one) not in held]
    if created:
        raise ConfigurationError(
            f"A layer was created within a run, under FSDP: {listed(created)}.",
            "parameters are sharded before the first step: nobody would exchange the new ones' gradients, and every "
            "rank would train its own.",
            "build it in configure_model and freeze it until it is wanted, or use strategy='ddp'.",
        )
    try:
        sharded.trainable_changed()
    except AssertionError as error:
        raise ConfigurationError(
            "What trains changed within a run, and a unit of FSDP now trains parameters of several dtypes.",
            f"their gradients travel together. torch says: {error}",
            "keep layers of another dtype frozen, or convert the model to one dtype before the run.",
        ) from error
    gradients.trainable_changed()


def refuse_while_whole(sharded: Sharded) -> None:
    """Refuse that parameters were frozen, unfrozen or moved while they were gathered: torch would undo it unseen.

    Raises:
        ConfigurationError: names them.
    """
    moved = sharded.moved_while_whole()
    if moved:
        sharded.reshard()
        raise moved_by_hand(sharded.names_of(moved), "FSDPStrategy", GATHERED)
    changed = sharded.changed_while_whole()
    if changed:
        sharded.reshard()
        raise changed_within_window(sharded.names_of(changed), "FSDPStrategy")
