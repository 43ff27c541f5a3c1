"""Detection of strangers: programs that are not a test's own, and have the driver open.

A program that starts or exits there makes all others wait (docs/nvidia.md), and a machine's own monitor may do so at
any time: on one such host two short programs came every ten seconds, and in 30 bursts of requests each of the four
moments at which a cudaMalloc took more than 5 ms (7 to 34) was due to one of them. A measurement at that time is about
them.
"""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import attrs

from tests.support.mounted import alive

LENDER = "backend.nvidia.lender"
"""Word in the command line of the process in which a daemon duplicates descriptors; it is no child of this process."""
LOOK_S = 0.01
"""Seconds between two looks. A program that has the driver open for a shorter time may be missed."""


@attrs.frozen
class Visit:
    """A stranger's stay, in seconds of time.monotonic()."""

    begin: float
    """Time at which it was not there yet."""
    end: float
    """Time at which it was gone; infinity while it is there."""
    pid: int
    words: str
    """Its command line."""

    def __str__(self) -> str:
        return f"{self.words} (pid {self.pid}), {self.begin:.3f} to {self.end:.3f}"


class Strangers:
    """A lookout for strangers while the context is entered. Programs from before are none, as their start disturbs
    nothing any more; nor are descendants of this process, or the process by which a daemon borrows descriptors."""

    def __init__(self, device: str = "/nvidia") -> None:
        self._device = device
        self._looked = threading.Condition()
        self._until = 0.0
        self._there: dict[int, Visit] = {}
        self._over: list[Visit] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Strangers:
        self._known = _pids()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def during(self, begin: float, end: float) -> list[Visit]:
        """Return the strangers that were there at some time of a past interval."""
        with self._looked:
            assert self._looked.wait_for(lambda: self._until > end, timeout=10), "no look came"
            return [one for one in [*self._over, *self._there.values()] if one.begin < end and one.end > begin]

    def _watch(self) -> None:
        before, suspects = time.monotonic(), dict[int, float]()
        while not self._stop.wait(LOOK_S):
            now, pids = time.monotonic(), _pids()
            suspects |= {pid: before for pid in pids - self._known if not _ours(pid)}
            gone = {pid: suspects.pop(pid) for pid in list(suspects) if pid not in pids or not alive(pid)}
            visits = {
                pid: Visit(began, math.inf, pid, _words(pid))
                for pid, began in suspects.items()
                if pid in self._there or _has_open(pid, self._device)
            }
            with self._looked:
                self._over += [attrs.evolve(self._there.pop(pid), end=now) for pid in gone if pid in self._there]
                self._there |= visits
                self._until = now
                self._looked.notify_all()
            self._known, before = pids, now


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _stat(pid: int) -> list[str]:
    """Return state, parent and so on of a process (`proc(5)`); empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _ours(pid: int) -> bool:
    if LENDER in _words(pid).split():
        return True
    while pid > 1:
        if pid == os.getpid():
            return True
        stat = _stat(pid)
        pid = int(stat[1]) if stat else 0
    return False


def _has_open(pid: int, device: str) -> bool:
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            if device in os.readlink(f"/proc/{pid}/fd/{name}"):  # "/dev" may be at another place for them
                return True
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass  # it is about to be gone
    return False


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "?"
