"""Puts the parts of a run together: callbacks, loggers, optimizers, steps, and the loops that receive them."""
