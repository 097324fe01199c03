"""What `Fit` was told: where each setting comes from, and what it may be."""
