"""Requeues a SLURM job whose time limit is near."""

from __future__ import annotations

import logging
import signal
import subprocess
from collections.abc import Mapping

logger = logging.getLogger("drivetrain")

_SCONTROL_TIMEOUT = 30  # seconds


def requeue(number: int, variables: Mapping[str, str]) -> None:
    """Requeue this SLURM job if the run stopped because of a signal that only announces the job's time limit.

    Called only for runs that go on where they ended: a job that starts again from the beginning each time might never
    finish.

    ``sbatch --signal=USR1@90`` sends such a signal. SIGTERM does not count: ``scancel`` sends it too, and SLURM itself
    requeues a job that it preempts.

    Args:
        number: the signal's number.
        variables: the environment variables.
    """
    job = variables.get("SLURM_JOB_ID")
    if job is None or number in (signal.SIGINT, signal.SIGTERM):
        return
    command = ["scontrol", "requeue", job]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT, check=False)
        problem = result.stderr.strip() if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        logger.warning("%s: %s. Submit the job again to resume from the newest checkpoint.", " ".join(command), problem)
    else:
        logger.warning("%s: the job is queued again.", " ".join(command))
