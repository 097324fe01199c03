"""Randomly generated training programs, run under `Fit` and by a plain loop, and compared."""
