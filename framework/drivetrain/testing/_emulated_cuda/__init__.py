"""CUDA in the host's memory: devices, streams and events whose order is checked, on a build of torch without CUDA."""
