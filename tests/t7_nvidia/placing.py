"""Kernels of placed.cu: how many there were, when they were done, and on how many SMs each ran."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence

import attrs

from ggroupfs.client import Member
from tests.t7_nvidia.conftest import Reporting, wait_for
from tests.t7_nvidia.programs import Program, write

LAUNCHED, ERROR, FAULT, SMS, LAST = 8, 28, 32, 36, 40
"""Where placed.cu says what; kernels finished are at 0, and wrong ones at 16."""
KEPT, RAN = 4096, 4096
"""Number of kernels that the page tells of, and the offset of the first one."""
AT = RAN + 8 * KEPT
"""Offset of the time of the first one."""
SIZE = AT + 8 * KEPT
"""Bytes of the page."""
WHOLE = 2112
"""Blocks of a kernel that takes whole rounds on 132 SMs, and on 32, 64 and 96, which are a quarter, half and three
quarters of an H200 in its steps of 8."""


@attrs.frozen
class Change:
    """A change of the SMs of a program."""

    start: float
    """When it was written, seconds of time.monotonic()."""
    written_s: float
    """Seconds that the write took, and then a read of the file."""
    seconds: float
    """Seconds from the write until a kernel was done on the new SMs."""
    after: int
    """How many SMs these are."""


@attrs.frozen
class Kernel:
    """A kernel that is done."""

    number: int
    """0 is the first one of the program."""
    sms: int
    """Number of SMs that it ran on."""
    at: float
    """When it was seen to be done, seconds of time.monotonic()."""


def kernels(run: Reporting, first: int = 0) -> list[Kernel]:
    """Return the kernels from number `first` on that the page still tells of."""
    finished, found = run.u64(0), list[Kernel]()
    ran, at = (struct.unpack_from(f"<{KEPT}Q", run.page, offset) for offset in (RAN, AT))
    for number in range(max(first, finished - KEPT), finished):
        word = ran[number % KEPT]
        if word >> 16 == number + 1:  # a later one has its place otherwise
            found.append(Kernel(number, word & 0xFFFF, at[number % KEPT] / 1e9))
    return found


def acted(those: Iterable[Kernel], since: float, before: int, after: int) -> float | None:
    """Return the seconds from `since` until a kernel was done that ran on about as many SMs as it is to run on now, and
    not as before; None where there is none.

    What runs beside it may have some of its SMs: the number is `after` if it is nearer to that than to `before`.
    """
    for one in sorted(those, key=lambda one: one.at):
        if one.at >= since and abs(one.sms - after) < abs(one.sms - before):
            return one.at - since
    return None


def sms_of(run: Reporting) -> frozenset[int]:
    """Return the numbers of the SMs that its last kernel ran on."""
    words = struct.unpack_from("<3Q", run.page, LAST)
    return frozenset(64 * n + bit for n, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def together(runs: Sequence[Reporting], seconds: float) -> list[float]:
    """Return what each of some programs does a second from now on, by the count at 0, in the same time."""
    before, start = [run.u64(0) for run in runs], time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - start
    return [(run.u64(0) - was) / took for run, was in zip(runs, before, strict=True)]


def limit(run: Program, group: Member, value: object) -> int:
    """Set compute.sm.max of a program; return the SMs that it may have now, by the file."""
    write(group, "compute.sm.max", value)
    text = group.read("compute.sm.max")
    return run.u32(SMS) if text == "max" else int(text)


def change(run: Program, group: Member, percent: int, before: int) -> Change:
    """Give a program another part of the SMs; return once a kernel was done that ran on these."""
    first, start, found = run.passes, time.monotonic(), list[float]()
    after = limit(run, group, f"{percent}%")
    written_s = time.monotonic() - start

    def has_acted() -> bool:
        seconds = acted(kernels(run, first), start, before, after)
        found.extend([] if seconds is None else [seconds])
        return bool(found)

    wait_for(has_acted, f"kernels on {after} SMs", seconds=2)
    return Change(start, written_s, found[0], after)
