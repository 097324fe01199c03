"""Between processes: control plane, collectives, and ranks that fail."""
