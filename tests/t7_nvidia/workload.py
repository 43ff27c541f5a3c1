"""PyTorch programs that know nothing of ggroupfs: the same work each time, and how long it took.

    workload.py train FILE     a transformer of about 1 GB with its optimizer, deterministic
    workload.py infer FILE     a transformer's forward pass, replayed as one CUDA graph

FILE (tmpfs) has 24 bytes and 16 for each step: the number of steps done, a word that is set to make it stop before the
last, the number of steps that it may do so far; then for each step the loss (train) or a sum over the output (infer),
and the seconds that it took, both as doubles.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic matrix products (PyTorch, "Reproducibility")

import torch

HEAD, STEP = 24, 16
"""Bytes of FILE before the first step, and of each step."""


def model(layers: int) -> torch.nn.Module:
    """Return a stack of transformer blocks, the same each time."""
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda()


class Train:
    """Steps of training; 8 layers are 57 million parameters, of 16 bytes with gradient and moments."""

    def __init__(self) -> None:
        torch.use_deterministic_algorithms(True)
        self.model = model(8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.data = torch.randn(16, 8, 256, 768, generator=torch.Generator().manual_seed(2)).cuda()

    def step(self, number: int) -> float:
        batch = self.data[number % len(self.data)]
        loss = (self.model(batch) - batch.flip(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


class Infer:
    """Forward passes of 8 sequences, as one CUDA graph."""

    def __init__(self) -> None:
        self.model = model(8).eval().half()
        self.input = torch.zeros(8, 128, 768, device="cuda", dtype=torch.half)
        self.data = torch.randn(16, 8, 128, 768, generator=torch.Generator().manual_seed(2)).half().cuda()
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(3):
                self.output = self.model(self.input)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self.graph):
            self.output = self.model(self.input)

    def step(self, number: int) -> float:
        self.input.copy_(self.data[number % len(self.data)])
        self.graph.replay()
        return float(self.output.float().sum().item())


def main() -> None:
    mode, path = sys.argv[1:]
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), 0)
    work = Train() if mode == "train" else Infer()
    for number in range((len(page) - HEAD) // STEP):
        while not (stop := struct.unpack_from("<Q", page, 8)[0]) and number >= struct.unpack_from("<Q", page, 16)[0]:
            time.sleep(0.005)  # it is another program's turn
        if stop:
            break
        start = time.perf_counter()
        value = work.step(number)
        struct.pack_into("<dd", page, HEAD + STEP * number, value, time.perf_counter() - start)
        struct.pack_into("<Q", page, 0, number + 1)


if __name__ == "__main__":
    main()
