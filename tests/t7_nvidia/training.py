"""A PyTorch program that knows nothing of ggroupfs: it trains a small transformer, the same way each time.

    training.py FILE STEPS

FILE (8 bytes a step and 8 more, on tmpfs): the number of steps done, then the loss of each as a double. Copies go over
a stream of their own, so that the program has work in several TSGs.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic matrix products (PyTorch, "Reproducibility")

import torch


def main() -> None:
    path, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), 8 * (steps + 1))
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    copies = torch.cuda.Stream()
    data = torch.randn(64, 8, 128, 512, generator=torch.Generator().manual_seed(2)).pin_memory()
    for step in range(steps):
        with torch.cuda.stream(copies):
            batch = data[step % len(data)].to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(copies)
        batch.record_stream(torch.cuda.current_stream())
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        struct.pack_into("<d", page, 8 * (step + 1), loss.item())
        struct.pack_into("<Q", page, 0, step + 1)


if __name__ == "__main__":
    main()
