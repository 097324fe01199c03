"""The inner parts of `TrainModule` and `DataModule`: hooks, saved arguments, the handle on the run, export."""
