"""The cells of `space_gpu.py`, measured. One that fails is a finding, and the next one is measured."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.experiments.spaced.cells import (
    ACT_S,
    CHANGES,
    FULL_S,
    OTHERS,
    PAUSE_S,
    PERCENTS,
    RATE_S,
    SETTLE_S,
    SHARE_S,
    SHARES_S,
    STARTS,
    TAILS,
    WINDOW_S,
)
from tests.experiments.spaced.machine import Machine, rates, works
from tests.experiments.timed.cells import Cell, Tail
from tests.experiments.timed.results import Found

FILL, QUICK = "50", ("50", "264")
"""Microseconds of a block of a kernel that fills; and words of placed.cu for kernels of 0.1 ms on an H200."""
MORE, AGAIN_S = 3.0, 20.0
"""Times as long as planned that a session may take before it is given up, and seconds that then each part of its end
may."""
PRIORITY = 0
"""compute.priority of the one that serves."""


class TooLong(Exception):
    """A session takes much longer than it should."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong in the main thread after some seconds, and again while what is under way ends."""

    def late(*_: object) -> None:
        raise TooLong(f"not within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Measure:
    """The cells of one run."""

    def __init__(self, found: Found, machine: Machine, most_s: float) -> None:
        """`most_s` is the time for all of them, seconds: a session that has no room is left out."""
        self._found, self._machine, self._until = found, machine, time.monotonic() + most_s
        self._alone: dict[tuple[bool, str], list[float]] = {}  # as a client of MPS or not, by the name of the requests
        self._full = 0.0
        self._over = set[str]()

    def run(self, cells: Sequence[Cell]) -> None:
        """Measure these cells, session by session."""
        for session in dict.fromkeys(one.session for one in cells):
            mine = [one for one in cells if one.session == session]
            seconds = STARTS[session] + sum(one.seconds for one in mine)
            try:
                assert self._until - time.monotonic() > seconds, "left out: there is no time left"
                with limited(10 + MORE * seconds):
                    self._session(session, mine)
            except Exception as error:
                for one in mine:
                    if one.name not in self._over:
                        self._failed(one, error)

    def _session(self, session: str, cells: Sequence[Cell]) -> None:
        way, _, kind = session.partition("-")
        if session in ("rates", "change"):
            with self._machine.tree() as mount:
                for cell in cells:
                    with self._cell(cell):
                        (self._rates if session == "rates" else self._change)(cell, mount)
        elif session == "space-sms":
            with self._spatial(kind) as (mount, name, _):
                for cell in cells:
                    with self._cell(cell):
                        (self._halves if cell.what == "halves" else self._critical)(cell, mount, name)
        elif way == "space":
            self._space(kind, cells)
        else:
            self._by(way, kind, cells)

    @contextlib.contextmanager
    def _cell(self, cell: Cell) -> Iterator[None]:
        """Note what goes wrong with one cell, but that there is no time."""
        try:
            yield
        except TooLong:
            raise
        except Exception as error:
            self._failed(cell, error)
        self._over.add(cell.name)

    def _failed(self, cell: Cell, error: Exception) -> None:
        self._over.add(cell.name)
        words = " ".join(f"{error}".split())[:300]
        self._found.add("failed", cell.name, why=f"{type(error).__name__}: {words}")

    # Eight small programs

    def _by(self, way: str, kind: str, cells: Sequence[Cell]) -> None:
        tails = [one for one in cells if one.what != "rate"]
        with self._machine.way(way) as words, contextlib.ExitStack() as stack:
            leader: Any = None
            if tails:  # as a client of better priority
                first = [*words, "CUDA_MPS_CLIENT_PRIORITY=0"]
                leader = stack.enter_context(self._machine.leader(first, TAILS[0].service_us))
                self._know(leader, [one.what for one in tails], client=True)
                words = [*words, "CUDA_MPS_CLIENT_PRIORITY=1"]
            runs = stack.enter_context(self._machine.eight(words, kind))
            for cell in cells:
                with self._cell(cell):
                    if cell.what == "rate":
                        self._rate(cell, runs)
                    else:
                        self._tail(cell, leader, client=True)

    @contextlib.contextmanager
    def _spatial(self, name: str) -> Iterator[tuple[Any, str, Any]]:
        """Yield a tree, the name of a spatial slice in it, and its control files."""
        from tests.t7_nvidia.spaces import spatial

        with self._machine.tree() as mount, spatial(mount, name) as (path, slice_):
            yield mount, path, slice_

    def _space(self, kind: str, cells: Sequence[Cell]) -> None:
        machine, tails = self._machine, [one.what for one in cells if one.what not in ("rate", "share")]
        with self._spatial(kind) as (mount, name, slice_), contextlib.ExitStack() as stack:
            outside, leader = machine.inside(mount), None
            if tails:
                leader = stack.enter_context(machine.leader(outside, TAILS[0].service_us))
                self._first(machine.group(mount, leader))
                self._know(leader, tails)
            if any(one.what == "share" for one in cells) and not self._full:
                with machine.filler(outside) as other:
                    time.sleep(SETTLE_S)
                    (self._full,) = rates([other], FULL_S)
            runs = stack.enter_context(machine.eight(machine.inside(mount, name), kind))
            self._are_beside(mount, runs)
            before: list[float] = []
            for cell in cells:
                with self._cell(cell):
                    if cell.what == "rate":
                        before = self._rate(cell, runs)
                    elif cell.what == "share":
                        self._share(cell, mount, runs, sum(before or rates(runs, WINDOW_S)))
                    else:
                        self._tail(cell, leader)
                        assert all(run.process.poll() is None for run in runs), "one of the slice has ended"
            print(f"server_lost {slice_.flat('compute.events').get('server_lost', 0)}", flush=True)

    def _are_beside(self, mount: Any, runs: Sequence[Any]) -> None:
        """Wait until the daemon knows all of them as members of a space."""
        from tests.t7_nvidia.conftest import wait_for
        from tests.t7_nvidia.spaces import is_beside

        groups = [self._machine.group(mount, run) for run in runs]
        wait_for(lambda: all(is_beside(group) for group in groups), "all are in the space")

    @staticmethod
    def _first(group: Any) -> None:
        from tests.t7_nvidia.programs import write

        if group is not None:
            write(group, "compute.priority", PRIORITY)

    def _rate(self, cell: Cell, runs: Sequence[Any]) -> list[float]:
        time.sleep(SETTLE_S)
        found = rates(runs, WINDOW_S)
        self._found.add("eight", cell.name, rates=[round(one, 2) for one in found])
        return found

    def _know(self, leader: Any, names: Sequence[str], client: bool = False) -> None:
        """Have the latencies of these requests that are served alone, by a client of MPS or another program."""
        for name in names:
            if (client, name) not in self._alone:
                self._alone[client, name] = self._serve(leader, name)

    def _serve(self, leader: Any, name: str) -> list[float]:
        from tests.experiments.timed.tails import chunks, serve

        tail: Tail = next(one for one in TAILS if str(one) == name)
        return [seconds for wanted in chunks(tail, tail.requests) for seconds in serve(leader, wanted)]

    def _tail(self, cell: Cell, leader: Any, client: bool = False) -> None:
        from tests.experiments.timed.tails import milliseconds

        beside, alone = self._serve(leader, cell.what), self._alone[client, cell.what]
        self._found.add("tail", cell.name, ms=[milliseconds(beside)], alone_ms=[milliseconds(alone)])

    def _share(self, cell: Cell, mount: Any, runs: Sequence[Any], before: float) -> None:
        with self._machine.filler(self._machine.inside(mount)) as other:
            self._machine.group(mount, other)
            time.sleep(SHARES_S)
            done, *kept = rates([other, *runs], SHARE_S)
            self._found.add("share", cell.name, share=done / self._full, kept=sum(kept) / before)

    # Some SMs

    def _speed(self, *runs: Any) -> list[float]:
        time.sleep(ACT_S)
        return rates(runs, RATE_S)

    def _rates(self, cell: Cell, mount: Any) -> None:
        from tests.t7_nvidia.placing import SMS, WHOLE, limit, sms_of

        with self._machine.one(self._machine.inside(mount), FILL, str(WHOLE), cell.what) as run:
            group, total = self._machine.group(mount, run), run.u32(SMS)
            (full,) = self._speed(run)
            for percent in PERCENTS:
                sms = limit(run, group, f"{percent}%")
                (rate,) = self._speed(run)
                wanted = 1.0 if cell.what == "graph" else sms / total
                name, seen = f"{cell.name} {percent}%", len(sms_of(run))
                self._found.add("sms", name, done=rate / full, wanted=wanted, seen=seen)
            stat = group.flat("gcgroup.stat")
            print({key: stat.get(key) for key in ("capped_launches", "uncapped_launches")}, flush=True)

    def _change(self, cell: Cell, mount: Any) -> None:
        from tests.t7_nvidia.conftest import wait_for
        from tests.t7_nvidia.placing import LAUNCHED, SMS, change
        from tests.t7_nvidia.programs import STOP

        rng, ms = random.Random(cell.what), list[float]()
        with self._machine.one(self._machine.inside(mount), *QUICK, "own", "4", cell.what) as run:
            group, before, percent = self._machine.group(mount, run), run.u32(SMS), 100
            for _ in range(CHANGES):
                time.sleep(rng.uniform(PAUSE_S / 4, PAUSE_S))
                percent = rng.choice([one for one in (*PERCENTS, 100) if one != percent])
                changed = change(run, group, percent, before)
                before = changed.after
                ms.append(1e3 * changed.seconds)
            run.set(STOP, 1)
            wait_for(lambda: run.process.poll() is not None, "it ends", seconds=10)
            lost = max(0, run.u64(LAUNCHED) - run.passes) + run.u64(16)
            self._found.add("change", cell.name, ms=[round(one, 3) for one in ms], lost=lost)

    def _halves(self, cell: Cell, mount: Any, name: str) -> None:
        from tests.t7_nvidia.placing import SMS, WHOLE, limit, sms_of

        words, inside = (FILL, str(WHOLE)), self._machine.inside(mount, name)
        with self._machine.one(inside, *words) as first:
            (full,) = self._speed(first)
            with self._machine.one(inside, *words) as second:
                runs = (first, second)
                self._are_beside(mount, runs)
                sms = [limit(run, self._machine.group(mount, run), "50%") for run in runs]
                each = self._speed(*runs)
                print(f"SMs of both: {len(sms_of(first) & sms_of(second))}", flush=True)
                for number, (run, rate, own) in enumerate(zip(runs, each, sms, strict=True)):
                    wanted, seen = own / run.u32(SMS), len(sms_of(run))
                    self._found.add("sms", f"{cell.name} {number}", done=rate / full, wanted=wanted, seen=seen)

    def _critical(self, cell: Cell, mount: Any, name: str) -> None:
        """One program with 64 SMs, beside none to four that share the rest."""
        from tests.t7_nvidia.placing import WHOLE, limit

        inside, found = self._machine.inside(mount, name), list[float]()
        with contextlib.ExitStack() as stack:
            runs: list[Any] = []
            for count in range(1 + OTHERS):
                run = stack.enter_context(self._machine.one(inside, FILL, str(WHOLE)))
                runs.append(run)
                limit(run, self._machine.group(mount, run), 64)
                for other in runs[1:]:
                    works(other)
                    limit(other, self._machine.group(mount, other), max(8, 64 // count // 8 * 8))
                self._are_beside(mount, runs)
                critical, *others = self._speed(*runs)
                print(f"{cell.name}: {critical:.1f}/s beside {' '.join(f'{one:.1f}' for one in others)}", flush=True)
                found.append(critical)
            self._found.add("critical", cell.name, rates=[round(one, 2) for one in found])
