"""The GPU of a stock NVIDIA driver: nothing is loaded into the kernel or into the programs that are controlled."""
