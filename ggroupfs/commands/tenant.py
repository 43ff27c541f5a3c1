"""``ggroupfs tenant``: a program of the software GPU that works, checks its own memory and reports its progress."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from backend.door.environment import families
from backend.soft.client import Device
from ggroupfs.mounts import DEFAULT_MOUNTPOINT
from ggroupfs.serving import require_trusted
from ggroupfs.text import values

LOOK_S = 0.1
"""Longest wait for progress, seconds, before the next check for an interrupt."""

CHECKED = 64
"""Pages checked and rewritten at each report."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--gmem", type=_size, default=1 << 30, metavar="BYTES", help="memory to allocate: 2G")
    parser.add_argument("--kernel", type=_time, default=5000, metavar="TIME", help="length of a kernel: 5ms")
    parser.add_argument("--contexts", type=int, default=1, help="contexts, each with a TSG of its own")
    parser.add_argument("--depth", type=int, default=32, help="kernels kept in flight, in each context")
    parser.add_argument("--touch", type=int, default=0, metavar="PAGES", help="pages that each kernel touches")
    parser.add_argument("--report", type=float, default=0.5, metavar="SECONDS", help="between two reports")
    parser.add_argument("--seconds", type=float, default=None, help="end after this time; else when ended")


def _size(word: str) -> int:
    try:
        return values.amount(word)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no size") from error


def _time(word: str) -> int:
    try:
        return values.span(word)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no time") from error


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Exit code 1 if it ever read something else than it wrote."""
    require_trusted(arguments.mount)
    for complaint in families(os.environ)[1]:
        print(f"ggroupfs: {complaint}: ignored", file=sys.stderr)
    with Device(arguments.mount, arguments.gpu) as device:
        worker, interrupted = Worker(device, arguments), _interrupted()
        began = time.monotonic()
        deadline = began + arguments.seconds if arguments.seconds is not None else float("inf")
        while (now := time.monotonic()) < deadline and not interrupted.is_set():
            worker.work(min(now + arguments.report, deadline), interrupted)
            if not interrupted.is_set():
                worker.check(CHECKED)
                worker.report(time.monotonic() - began)
        worker.check(len(worker.pages))
        worker.report(time.monotonic() - began)
        return 1 if worker.corrupt else 0


def _interrupted() -> threading.Event:
    """Return an event that is set by SIGINT. A second SIGINT ends the program, which may be frozen.

    KeyboardInterrupt could hit between the write of a page and the note of its content, and the page would count as
    corrupt.
    """
    came = threading.Event()

    def handle(number: int, frame: object) -> None:
        came.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    return came


class Worker:
    """The contexts and the memory of the tenant, with the results of its checks."""

    def __init__(self, device: Device, arguments: argparse.Namespace) -> None:
        self._device = device
        self._kernel, self._depth = arguments.kernel, arguments.depth
        self._tsgs = [device.join() for _ in range(arguments.contexts)]
        self._launched = dict.fromkeys(self._tsgs, 0)
        self.pages = device.alloc(arguments.gmem) if arguments.gmem else range(0)
        """Pages of its memory."""
        self._touched = self.pages[: arguments.touch]
        self._stamp = os.getpid() << 32
        self._stamps = {page: self._stamp + page for page in self.pages}
        if self.pages:
            device.write(self.pages, self._stamp + self.pages.start)
        self._next = self.pages.start
        self.checked = 0
        """Number of pages read back so far."""
        self.corrupt = 0
        """Number of pages read back with a wrong content."""

    @property
    def finished(self) -> int:
        """Kernels finished, in all contexts."""
        return sum(self._device.finished.values())

    def work(self, until: float, interrupted: threading.Event) -> None:
        """Keep the GPU busy until `until`, by time.monotonic(), or until interrupted."""
        while (now := time.monotonic()) < until and not interrupted.is_set():
            for tsg in self._tsgs:
                short = self._depth - (self._launched[tsg] - self._device.finished[tsg])
                if short > 0:
                    self._device.launch(tsg, short, self._kernel, self._touched)
                    self._launched[tsg] += short
            self._device.take_progress(min(until - now, LOOK_S))

    def check(self, count: int) -> None:
        """Read the next pages back, check them, and write new content."""
        for _ in range(min(count, len(self.pages))):
            page = self._next
            self._next = page + 1 if page + 1 < self.pages.stop else self.pages.start
            (found,) = self._device.read(range(page, page + 1))
            self.checked += 1
            self.corrupt += found != self._stamps[page]
            self._stamps[page] += len(self.pages)
            self._device.write(range(page, page + 1), self._stamps[page])

    def report(self, elapsed: float) -> None:
        """Print one JSON line."""
        line = {
            "pid": os.getpid(),
            "seconds": round(elapsed, 3),
            "launched": sum(self._launched.values()),
            "finished": self.finished,
            "pages": len(self.pages),
            "checked": self.checked,
            "corrupt": self.corrupt,
        }
        print(json.dumps(line), flush=True)
