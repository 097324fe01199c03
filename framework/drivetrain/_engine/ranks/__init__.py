"""The processes of a run: how they start, what they agree on, and how they report failures."""
