"""The limit up to which sharded parameters are gathered after a run. This file imports only cheap modules."""

from __future__ import annotations

import logging

logger = logging.getLogger("drivetrain")

GATHER_LIMIT = 8 * 2**30
"""Default of ``gather_limit``, the size in bytes up to which a module's parameters are gathered after a run."""


def check_gather_limit(nbytes: int, limit: int, strategy: str, warn: bool) -> bool:
    """Return whether parameters of ``nbytes`` are gathered after a run. If they are not, log a message.

    Args:
        nbytes: size of all sharded parameters.
        limit: the strategy's ``gather_limit``.
        strategy: name of the strategy's class.
        warn: whether to log at level WARNING instead of DEBUG. A limit of 0 asks for no gathered module and is never
            warned about.
    """
    if nbytes <= limit:
        return True
    logger.log(
        logging.WARNING if warn and limit else logging.DEBUG,
        "The parameters take %.1f GiB, which is more than gather_limit, so they are on the meta device after the run. "
        "The weights are in the run's checkpoints. To have whole weights in the module, raise %s(gather_limit=...).",
        nbytes / 2**30,
        strategy,
    )
    return False
