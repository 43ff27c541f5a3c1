"""A program that uses two GPUs at once: a thread on each multiplies matrices and counts the products in FILE."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading

os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"

import torch


def work(page: mmap.mmap, gpu: int) -> None:
    """Count products on one GPU for ever."""
    a = torch.randn(2048, 2048, device=f"cuda:{gpu}")
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        while True:
            a @ a
            stream.synchronize()
            struct.pack_into("<Q", page, 8 * gpu, struct.unpack_from("<Q", page, 8 * gpu)[0] + 1)


def main() -> None:
    with open(sys.argv[1], "r+b") as file:
        page = mmap.mmap(file.fileno(), 16)
    for gpu in (0, 1):
        threading.Thread(target=work, args=(page, gpu)).start()


if __name__ == "__main__":
    main()
