"""How batches are read: the order of samples, their partition over ranks, loaders, streams and their positions."""
