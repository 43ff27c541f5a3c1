"""Inference by a model of torchvision, without any knowledge of ggroupfs: the same batch again and again.

    vision.py FILE MIB MODEL

The batch is chosen so that the program's memory is about MIB. Weights are random, and the same each time. FILE is a
page on tmpfs: passes done (u64 @0); wrong outputs (u64 @16: all ones until the program is told to stop, then the number
that differ in any bit from those of the first pass); stop (u32 @24, set by the caller); error (u32 @28).
"""

from __future__ import annotations

import mmap
import os
import struct
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic matrix products (PyTorch, "Reproducibility")

import torch
import torchvision

SIDE = {"inception_v3": 299}
"""Side of the images in pixels, if not 224."""
TRIED = (16, 32)
"""Batches from whose memory that of other batches is extrapolated."""
IN_FLIGHT = 2


def reserved(model: torch.nn.Module, batch: int, side: int) -> int:
    """Return the total memory of a pass over a batch, bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model(images(batch, side))
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_reserved())


def images(batch: int, side: int) -> torch.Tensor:
    """Return random images, the same each time."""
    chance = torch.Generator(device="cuda").manual_seed(2)
    made = torch.randn(batch, 3, side, side, generator=chance, device="cuda", dtype=torch.bfloat16)
    return made.contiguous(memory_format=torch.channels_last)


def main() -> int:
    """Run until told to stop."""
    path, mib, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), 4096)
    struct.pack_into("<Q", page, 16, (1 << 64) - 1)
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(1)
    more = {"init_weights": False} if name == "inception_v3" else {}
    model = getattr(torchvision.models, name)(weights=None, **more).eval().bfloat16().cuda()
    model = model.to(memory_format=torch.channels_last)
    side = SIDE.get(name, 224)
    with torch.inference_mode():
        few, many = (reserved(model, batch, side) for batch in TRIED)
        each = max(1, (many - few) // (TRIED[1] - TRIED[0]))
        batch = max(1, TRIED[1] + ((mib << 20) - many) // each)
        torch.cuda.empty_cache()
        data = images(batch, side)
        first = model(data).clone()
        last, done = first, 0
        queued: list[torch.cuda.Event] = []
        while not struct.unpack_from("<I", page, 24)[0]:
            if len(queued) >= IN_FLIGHT:
                queued.pop(0).synchronize()
                done += 1
                struct.pack_into("<Q", page, 0, done)
            last = model(data)
            queued.append(torch.cuda.Event(blocking=True))
            queued[-1].record()
        torch.cuda.synchronize()
        wrong = int((last.view(torch.int16) != first.view(torch.int16)).sum().item())
        struct.pack_into("<Q", page, 16, wrong)
    return int(wrong != 0)


if __name__ == "__main__":
    sys.exit(main())
