"""A run's folder, and ``run.json`` in it: the record of the run's configuration, liveness and outcome."""
