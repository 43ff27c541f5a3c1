"""One rank of a program on several GPUs: a step is a network forward and back, and its gradients summed over all ranks.

    gang.py PAGE RANK RANKS MEET [--mib 2048] [--device cuda] [--seed 1]

RANK is also the GPU; MEET is a file that does not exist yet, through which the ranks meet. It knows nothing of
ggroupfs. Passes are steps. The page has the longest step in nanoseconds besides (u64 @40), which the caller may set
back to 0. Rank 0 is told to stop, and all ranks end after the same step; words wrong are the sums that were not those
of all ranks, and the gradients that are not finite.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink's multicast: its memory is of several GPUs, and cannot move

import torch
import torch.distributed
from page import PASSES, READY, UNKNOWN, WRONG, Page
from torch import nn

LONGEST = 40
LAYERS, BATCH = 8, 512
SUMMED = 1 << 16
"""Words whose sum over the ranks is known."""


def network(mib: int, device: str) -> nn.Module:
    """Layers that have so many MiB of weights together, and as many of gradients."""
    width = max(64, int(((mib << 20) / 2 / LAYERS) ** 0.5) // 64 * 64)
    layers = (nn.Sequential(nn.Linear(width, width, dtype=torch.bfloat16), nn.GELU()) for _ in range(LAYERS))
    return nn.Sequential(*layers).to(device)


def main() -> int:
    """Step until rank 0 is told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("meet")
    parser.add_argument("--mib", type=int, default=2048, help="of weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    page, device = Page(options.page), options.device
    page.set64(WRONG, UNKNOWN)
    if device != "cpu":
        torch.cuda.set_device(options.rank)
    backend = "gloo" if device == "cpu" else "nccl"
    meeting = f"file://{options.meet}"
    torch.distributed.init_process_group(backend, meeting, world_size=options.ranks, rank=options.rank)
    torch.manual_seed(options.seed + options.rank)
    model = network(options.mib, device)
    width = model[0][0].in_features
    data = torch.randn(BATCH if device != "cpu" else 4, width, device=device, dtype=torch.bfloat16)
    each = torch.full((SUMMED,), float(options.rank + 1), device=device)
    expected = float(sum(range(1, options.ranks + 1)))
    flag, wrong, done = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.long, device=device), 0
    while True:
        begin = time.monotonic_ns()
        model.zero_grad(set_to_none=True)
        model(data).float().square().mean().backward()
        summed = each.clone()
        for tensor in (*(parameter.grad for parameter in model.parameters()), summed):
            torch.distributed.all_reduce(tensor)
        wrong += (summed != expected).sum()
        flag.fill_(float(page.stop) if options.rank == 0 else 0.0)
        torch.distributed.all_reduce(flag)
        over = bool(flag.item())  # waits for all of the step
        done += 1
        page.set64(PASSES, done)
        page.set64(LONGEST, max(page.u64(LONGEST), time.monotonic_ns() - begin))
        page.set64(READY, 1)
        if over:
            break
    wrong += sum((~torch.isfinite(parameter.grad)).sum() for parameter in model.parameters())
    page.set64(WRONG, int(wrong.item()))
    torch.distributed.destroy_process_group()
    return int(wrong.item() != 0)


if __name__ == "__main__":
    sys.exit(main())
