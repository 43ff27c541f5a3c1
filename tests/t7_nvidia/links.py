"""Bandwidth between two GPUs, and between one and pinned host memory: GB/s, the best of five copies of 2 GiB.

Prints two numbers: PCIe (the slower direction) and from GPU 0 to GPU 1.
"""

from __future__ import annotations

import time

import torch

SIZE = 2 << 30


def gb_s(to: torch.Tensor, source: torch.Tensor) -> float:
    """Return the best of five."""
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        to.copy_(source)
        for gpu in (0, 1):
            torch.cuda.synchronize(gpu)
        best = max(best, SIZE / (time.perf_counter() - start) / 1e9)
    return best


def main() -> None:
    host = torch.zeros(SIZE, dtype=torch.uint8, pin_memory=True)
    first, second = (torch.zeros(SIZE, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in (0, 1))
    print(min(gb_s(host, first), gb_s(first, host)), gb_s(second, first))


if __name__ == "__main__":
    main()
