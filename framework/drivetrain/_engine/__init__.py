"""What `Fit` does behind its public face: finds the processes, the data and the parts, and runs a stage."""
