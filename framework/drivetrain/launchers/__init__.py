"""How processes start."""
