"""What `PredictionWriter` is made of: one run's writing, its store, and what was there before."""
