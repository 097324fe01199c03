"""Utilities for the process and its devices: random generators, seeds, transfer, and state that a run restores."""
