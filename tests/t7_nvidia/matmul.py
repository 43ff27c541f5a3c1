"""A PyTorch program that multiplies matrices, one request after another, and reports how long each took (Flyt, table
6).

    matmul.py zeros|random [GROUP SOCKET]

It says `loaded` when it has everything but the GPU. Then it takes commands, a line each, on standard input:

    begin          uses the GPU from now on; answers `ready`
    think RATIO    after a request waits for so many times its duration
    take           answers with [[START, SECONDS], ...] of the requests since the last `take`, as JSON

A request is PRODUCTS products of SIDE x SIDE float32 matrices, without tensor cores; START is by CLOCK_MONOTONIC. With
a group and a socket it reports to the policy slo. Tensor cores take so much power that the GPU clocks lower the busier
it is, for every program, and the latency of one program depends on how busy the others keep it, however they are
scheduled: with bf16 and zeros, 79.7 ms alone and computing half of the time, 83.7 ms alone and back to back (H200).
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time

import torch

from ggroupfs.client import Latencies

SIDE, PRODUCTS = 4096, 30


class Program:
    """The program; see the module."""

    def __init__(self) -> None:
        self.think = 0.0
        self._done: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()

    def listen(self) -> None:
        """Answer commands, also during a long request."""
        for line in sys.stdin:
            if line.startswith("think"):
                self.think = float(line.split()[1])
            else:
                done = [self._done.get() for _ in range(self._done.qsize())]
                print(json.dumps(done), flush=True)

    def run(self, make: str, latencies: Latencies | None) -> None:
        """Work until killed."""
        shape = (SIDE, SIDE)
        torch.backends.cuda.matmul.allow_tf32 = False
        a, b = [getattr(torch, make)(shape, device="cuda", dtype=torch.float32) for _ in range(2)]
        product = a @ b
        torch.cuda.synchronize()
        print("ready", flush=True)
        threading.Thread(target=self.listen, daemon=True).start()
        while True:
            start = time.monotonic()
            for _ in range(PRODUCTS):
                torch.matmul(a, b, out=product)
            torch.cuda.synchronize()
            took = time.monotonic() - start
            self._done.put((start, took))
            if latencies is not None:
                latencies.report(took)
            time.sleep(self.think * took)


if __name__ == "__main__":
    print("loaded", flush=True)
    assert sys.stdin.readline() == "begin\n"
    names = {"zeros": "zeros", "random": "randn"}
    Program().run(names[sys.argv[1]], Latencies(*sys.argv[2:]) if len(sys.argv) > 2 else None)
