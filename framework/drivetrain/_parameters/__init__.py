"""A module's parameters and optimizer state by name: their ties, locks, trainability and what loads them."""
