"""What a checkpoint holds of a run, who writes it, and how a run goes on from it."""
