"""GPU memory limits for CUDA programs on a stock driver: the daemon's side. The library's is in C, beside it."""
