"""CUDA emulated in host memory, for builds of torch without CUDA: devices, streams and events with race detection."""
