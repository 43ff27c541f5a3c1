"""Two kinds of PyTorch programs that know nothing of ggroupfs, controlled on standard input.

    colocated.py requests [SOCKET]
                             a latency-critical one: requests at random, each four steps of a stack of 16 bf16 blocks;
                             it reports its latencies to a policy at SOCKET
    colocated.py products    one that would fill the GPU: products of 8192 x 8192 bf16 matrices, back to back. Tensor
                             cores bring an H200 to its power cap, and the driver lowers the clock for every program
    colocated.py vectors     another one that would: it multiplies vectors of 2 GiB, and the clock stays

All print `ready`. `go RATE SECONDS` has the first kind serve so many requests a second for so long (open loop: a
request that comes while another is served waits, and that time counts), and print their latencies as JSON, in seconds.
`count` has the others print the number of products that they have done.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable

import torch

WIDTH, BLOCKS, STEPS = 4096, 16, 4
SIDE, LENGTH, IN_FLIGHT = 8192, 1 << 29, 8


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.01


def requests() -> None:
    torch.manual_seed(0)
    shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    blocks = [[weight(*shape) for shape in shapes] for _ in range(BLOCKS)]
    state = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)

    def step(x: torch.Tensor) -> torch.Tensor:
        for a, b, c, d in blocks:
            h = x @ a
            x = x + (h[:, :WIDTH] * torch.sigmoid(h[:, WIDTH : 2 * WIDTH])) @ b
            x = x + torch.relu(x @ c) @ d
            x = x / (x.abs().mean() + 1e-3)
        return x

    reported = None
    if len(sys.argv) > 2:
        from ggroupfs.client import Latencies

        reported = Latencies(None, sys.argv[2])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(state)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step(state)
    torch.cuda.synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        rate, seconds = map(float, line.split()[1:])
        chance, start, latencies = random.Random(1), time.monotonic(), []
        due = start + chance.expovariate(rate)
        while due < start + seconds:
            while time.monotonic() < due:
                time.sleep(0.0001)
            for _ in range(STEPS):
                graph.replay()
            torch.cuda.synchronize()
            latencies.append(time.monotonic() - due)
            if reported is not None:
                reported.report(latencies[-1])
            due += chance.expovariate(rate)
        print(json.dumps(latencies), flush=True)


def products() -> None:
    a, b = [torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    out = a @ b
    batch(lambda: torch.matmul(a, b, out=out))


def vectors() -> None:
    a = torch.randn(LENGTH, device="cuda")
    out = a * 1.5
    batch(lambda: torch.mul(a, 1.5, out=out))


def batch(product: Callable[[], object]) -> None:
    torch.cuda.synchronize()
    done = 0

    def answer() -> None:
        """Answer at once, also while off the runlist: a later answer would not be about the time of the question."""
        for _ in sys.stdin:
            print(done, flush=True)

    threading.Thread(target=answer, daemon=True).start()
    print("ready", flush=True)
    events: list[torch.cuda.Event] = []
    while True:
        product()
        event = torch.cuda.Event()
        event.record()
        events.append(event)
        if len(events) >= IN_FLIGHT:
            events.pop(0).synchronize()
            done += 1


if __name__ == "__main__":
    {"requests": requests, "products": products, "vectors": vectors}[sys.argv[1]]()
