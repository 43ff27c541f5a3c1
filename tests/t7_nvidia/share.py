"""A PyTorch program that knows nothing of ggroupfs: shares a tensor with another process by legacy CUDA IPC.

    share.py

Says "shared" once the other has seen it, waits for a line, has the other change it, and exits with 0 if it sees that.
"""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

COUNT = 64 << 20


def end_with(parent: BaseProcess) -> None:
    """End with the parent: a killed parent does not end its children, and this one would keep its context too long."""
    parent.join()
    os._exit(1)


def other(given: Any, seen: Any, go: Any, done: Any) -> None:
    threading.Thread(target=end_with, args=[parent_process()], daemon=True).start()
    tensor = given.get()
    assert int(tensor.sum()) == COUNT, "what was there"
    seen.set()
    go.wait()
    tensor.add_(1)
    torch.cuda.synchronize()
    done.set()
    given.get()  # the owner's memory must be there until the owner has looked


def main() -> None:
    context = multiprocessing.get_context("spawn")
    given, seen, go, done = context.Queue(), context.Event(), context.Event(), context.Event()
    child = context.Process(target=other, args=(given, seen, go, done))
    child.start()
    tensor = torch.ones(COUNT, dtype=torch.int32, device="cuda")
    given.put(tensor)
    assert seen.wait(60)
    print("shared", flush=True)
    sys.stdin.readline()
    go.set()
    assert done.wait(60)
    assert int(tensor.sum()) == 2 * COUNT, "what the other did"
    given.put(None)
    child.join(60)
    assert child.exitcode == 0
    print("done", flush=True)


if __name__ == "__main__":
    main()
