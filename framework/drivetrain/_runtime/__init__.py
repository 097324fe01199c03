"""The process and its devices: generators, and state that a run puts back."""
