"""The hot path: training, evaluation and prediction."""
