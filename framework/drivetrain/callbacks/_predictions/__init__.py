"""Implementation of `PredictionWriter`: writing, storage, and resuming a killed run."""
