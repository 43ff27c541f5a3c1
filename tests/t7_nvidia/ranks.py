"""One rank of a program on two GPUs, without any knowledge of ggroupfs. In each step it reads all of its memory, and
sums up with the other rank by NCCL.

    ranks.py FILE MIB RANK RENDEZVOUS

RENDEZVOUS is a file through which the ranks meet; RANK is also the GPU. FILE is a page on tmpfs: steps done (u64 @0),
wrong sums (u64 @16, all ones until both ranks have stopped), stop (u32 @24, set by the caller for rank 0).
"""

from __future__ import annotations

import mmap
import struct
import sys

import torch
import torch.distributed

RANKS = 2
PARTS = 32
"""Number of tensors that the memory is divided into."""
SUMMED = 16 << 20
"""Number of elements that are summed up over the ranks in each step: 64 MiB."""


def main() -> int:
    """Run until rank 0 is told to stop."""
    path, mib, rank, rendezvous = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), 4096)
    struct.pack_into("<Q", page, 16, (1 << 64) - 1)
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", f"file://{rendezvous}", world_size=RANKS, rank=rank)
    parts = [torch.full(((mib << 20) // 4 // PARTS,), 1.0, device="cuda") for _ in range(PARTS)]
    each = torch.full((SUMMED,), float(rank + 1), device="cuda")
    expected = float(sum(range(1, RANKS + 1)))
    flag, wrong, steps = torch.zeros(1, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda"), 0
    while True:
        total = torch.stack([part.sum() for part in parts]).sum()
        summed = each.clone()
        torch.distributed.all_reduce(summed)
        wrong += (summed != expected).sum() + (total != float(sum(part.numel() for part in parts))).sum()
        flag.fill_(float(struct.unpack_from("<I", page, 24)[0] if rank == 0 else 0))
        torch.distributed.all_reduce(flag)
        steps += 1
        struct.pack_into("<Q", page, 0, steps)
        if flag.item():
            break
    struct.pack_into("<Q", page, 16, int(wrong.item()))
    torch.distributed.destroy_process_group()
    return int(wrong.item() != 0)


if __name__ == "__main__":
    sys.exit(main())
