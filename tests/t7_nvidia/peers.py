"""A program whose two GPUs read each other's memory, and that knows nothing of ggroupfs: kernels, and copies.

    peers.py FILE MIB

Half of its memory is on each GPU. FILE (a page on tmpfs): steps done (u64 @0), sums wrong (u64 @16, all ones until it
has stopped), stop (u32 @24, set by the caller).
"""

from __future__ import annotations

import mmap
import os
import struct
import sys

os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"

import torch

PARTS = 16
"""Tensors that the memory of a GPU is in."""


def matrices(gpu: int, mib: int) -> list[torch.Tensor]:
    """Each of its own numbers, whole ones: their sums are exact."""
    side = int(((mib << 20) // 2 // 4 // PARTS) ** 0.5)
    count = torch.arange(side * side, device=f"cuda:{gpu}", dtype=torch.float32).reshape(side, side)
    return [(count + part + gpu) % 65521 for part in range(PARTS)]


def main() -> int:
    """Run until told to stop."""
    path, mib = sys.argv[1], int(sys.argv[2])
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), 4096)
    struct.pack_into("<Q", page, 16, (1 << 64) - 1)
    assert all(torch.cuda.can_device_access_peer(gpu, 1 - gpu) for gpu in (0, 1))
    parts = [matrices(0, mib), matrices(1, mib)]
    sums = [[part.double().sum().item() for part in each] for each in parts]
    wrong = steps = 0
    while not struct.unpack_from("<I", page, 24)[0]:
        for gpu in (0, 1):
            for number, part in enumerate(parts[1 - gpu]):
                # Transposed, torch copies by a kernel that uses the other GPU's memory; as it is, by the copy engine.
                there = torch.empty_like(part, device=f"cuda:{gpu}")
                there.copy_(part.t() if (steps + number) % 2 else part)
                wrong += there.double().sum().item() != sums[1 - gpu][number]
                wrong += part.double().sum().item() != sums[1 - gpu][number]
        steps += 1
        struct.pack_into("<Q", page, 0, steps)
    struct.pack_into("<Q", page, 16, wrong)
    return int(wrong != 0)


if __name__ == "__main__":
    sys.exit(main())
