"""Asks SLURM for the job once more, where it is about to end it."""

from __future__ import annotations

import logging
import signal
import subprocess
from collections.abc import Mapping

logger = logging.getLogger("drivetrain")

_PATIENCE = 30  # seconds


def requeue(number: int, variables: Mapping[str, str]) -> None:
    """Queue this job again, if it is SLURM's and left because of a signal that only says that its time runs out.

    That is what ``sbatch --signal=USR1@90`` sends. SIGTERM comes from ``scancel`` too, and where SLURM preempts a job
    it queues it again by itself.

    Args:
        number: of the signal.
        variables: the environment.
    """
    job = variables.get("SLURM_JOB_ID")
    if job is None or number in (signal.SIGINT, signal.SIGTERM):
        return
    command = ["scontrol", "requeue", job]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        answer = asked.stderr.strip() if asked.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        answer = str(error)
    if answer:
        logger.warning("%s: %s. Submit the job again, to go on from the newest checkpoint.", " ".join(command), answer)
    else:
        logger.warning("%s: the job is queued again.", " ".join(command))
