"""The loaders of a stage: where they come from, their limits and lengths, and when they are rebuilt."""
