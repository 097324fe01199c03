"""A run's folder and its ``run.json``, which records the run's configuration, liveness and outcome."""
