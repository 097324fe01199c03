"""A run's folder and its ``run.json``, which records the run's configuration, liveness and outcome."""

CKPT_PATH_KEYWORDS = ("last", "best", "auto")
"""The values of ``ckpt_path`` that are not paths."""
