"""A program that works in bursts, on a real GPU."""

from __future__ import annotations

import threading
import time

from tests.t7_nvidia.conftest import STOP, Worker


def bursts(one: Worker, over: threading.Event) -> None:
    """Work for 30 ms and idle for 20 ms, again and again."""
    while not over.is_set():
        one.set(STOP, 0)
        time.sleep(0.03)
        one.set(STOP, 2)
        time.sleep(0.02)
