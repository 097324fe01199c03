"""Training programs drawn at random, run under `Fit` and by a plain loop, and compared."""
