"""Root beside hostile tenants: it sets, freezes, moves and removes what is theirs, all the time, at random."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from ggroupfs.client.reading import numbers
from tests.hostile.page import TENANTS, Meter, Page, Timed, Word
from tests.hostile.processes import LIBC, PR_SET_PDEATHSIG

BUG = (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED, errno.ENOSYS, errno.EFAULT, errno.ELOOP)
"""Errnos that root must never get, except from a tenant that it moves."""
PAUSE_S = 0.003

SETTINGS = {
    "gmem.limit.high": ("0", "1M", "64M", "1G", "max", "max"),
    "gmem.limit.low": ("0", "64M", "max"),
    "gmem.swap.max": ("0", "64M", "max", "max"),
    "gmem.reclaim": ("1", "64M", "1T"),
    "gmem.peak": ("0",),
    "gmem.swap.peak": ("0",),
    "compute.timeslice": ("1ms", "default"),
    "compute.weight": ("1", "100", "10000"),
    "compute.priority": ("0", "8", "15"),
    "compute.max": ("1000 10000", "30000 100000", "max", "max"),
}
RESET = {
    "gmem.limit.high": "max",
    "gmem.limit.low": "0",
    "gmem.swap.max": "max",
    "compute.timeslice": "default",
    "compute.weight": "100",
    "compute.priority": "8",
    "compute.max": "max 100000",
    "compute.freeze": "0",
}
ACTS = ("sets", "freezes and thaws", "reads", "makes and removes slices", "moves", "looks at all", "moves to a cgroup")


class Operator:
    """The operator; see the module."""

    def __init__(self, mount: str, slices: Sequence[str], cgroups: Sequence[str], page: Page, seed: str) -> None:
        """`slices` are the tenants' slice directories, `cgroups` their cgroups."""
        self._mount = mount
        self._slices = slices
        self._cgroups = cgroups
        self._page = page
        self._seed = seed

    def run(self) -> None:
        """Start its threads; the last of them is this one."""
        for timed, act in ((Timed.MOVES, self._move), (Timed.KEEPER, self._keep)):
            threading.Thread(target=self._go_on, args=(timed, act), daemon=True).start()
        self._go_on(Timed.OPERATOR, self._set)

    def _go_on(self, timed: Timed, act: Callable[[random.Random, Meter], None]) -> None:
        chance, meter = random.Random(f"{self._seed}/{timed}"), self._page.meter(timed)
        while True:
            if quiet := int(self._page.words[Word.QUIET]):
                self._page.words[Word.OPERATORS_QUIET + timed] = quiet
            else:
                act(chance, meter)
            time.sleep(PAUSE_S)

    def _call(self, meter: Meter, at: int, call: Callable[[], object]) -> None:
        try:
            with meter.call(at):
                call()
        except OSError as error:
            if error.errno in BUG and at != ACTS.index("moves"):
                meter.failed(at, error.errno or 0)

    def _group(self, chance: random.Random) -> str:
        """Return a directory of control files of a tenant: of a process, or of its slice."""
        gpu = chance.choice((0, 0, 0, 1))
        pids = self._pids() if chance.random() < 0.6 else []
        return f"{self._mount}/{chance.choice(pids)}/{gpu}" if pids else f"{chance.choice(self._slices)}/{gpu}"

    def _pids(self) -> list[int]:
        neighbour = int(self._page.words[Word.NEIGHBOUR_PID])
        try:
            return [pid for pid in numbers(self._mount) if pid != neighbour]
        except OSError:
            return []

    def _set(self, chance: random.Random, meter: Meter) -> None:
        at, group = chance.choice((0, 0, 0, 1, 2, 2)), self._group(chance)
        if at == 0:
            name = chance.choice(list(SETTINGS))
            self._call(meter, at, lambda: write(f"{group}/{name}", chance.choice(SETTINGS[name])))
            if name in RESET:
                self._call(meter, at, lambda: write(f"{group}/{name}", RESET[name]))
        elif at == 1:
            self._call(meter, at, lambda: write(f"{group}/compute.freeze", "1"))
            time.sleep(chance.uniform(0, 0.005))
            self._call(meter, at, lambda: write(f"{group}/compute.freeze", "0"))
        else:
            for name in ("gmem.stat", "gmem.events", "compute.events", "gcgroup.stat"):
                self._call(meter, at, lambda name=name: read(f"{group}/{name}"))  # type: ignore[misc]

    def _move(self, chance: random.Random, meter: Meter) -> None:
        words, first = self._page.words, self._page.place(0, 0)
        waiting = [int(words[at]) for at in range(first, self._page.place(TENANTS, 0), 4) if words[at + 3]]
        if pids := waiting or self._pids():
            pid, gpu = chance.choice(pids), chance.choice((0, 0, 0, 1))
            self._call(meter, 4, lambda: write(f"{self._mount}/{pid}/{gpu}/compute.migrate", str(1 - gpu)))

    def _keep(self, chance: random.Random, meter: Meter) -> None:
        """Make, remove and give away slices; move processes between cgroups, and make their directories."""
        slice_ = chance.choice(self._slices)
        what = chance.randrange(5)
        if what == 0:
            with contextlib.suppress(OSError):
                for name in os.listdir(slice_)[:20]:
                    self._call(meter, 3, lambda name=name: os.rmdir(f"{slice_}/{name}"))  # type: ignore[misc]
        elif what == 1:
            self._call(meter, 3, lambda: os.rmdir(slice_))
            self._call(meter, 3, lambda: os.makedirs(slice_, exist_ok=True))
            self._call(meter, 3, lambda: os.chown(slice_, 65534, 65534))
        elif what == 2:
            self._call(meter, 3, lambda: os.chown(slice_, chance.choice((0, 65534, 65534)), -1))
            self._call(meter, 3, lambda: os.chown(slice_, 65534, 65534))
        elif what == 3 and (pids := self._pids()):
            pid = chance.choice(pids)
            with contextlib.suppress(OSError), meter.call(6, judged=False):
                write(f"{chance.choice(self._cgroups)}/cgroup.procs", str(pid))
            self._call(meter, 3, lambda: os.rmdir(f"{self._mount}/{pid}"))
        else:
            self._call(meter, 5, lambda: [os.stat(f"{self._mount}/{pid}/0") for pid in self._pids()])


def write(path: str, text: str) -> None:
    """Write with one write(2)."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read(path: str) -> bytes:
    """Read with one read(2)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def main() -> None:
    """Run the program. Its arguments: the page's descriptor, the mountpoint, the seed, then slices and as many
    cgroups."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    places = sys.argv[4:]
    half = len(places) // 2
    Operator(sys.argv[2], places[:half], places[half:], Page(int(sys.argv[1])), sys.argv[3]).run()


if __name__ == "__main__":
    main()
