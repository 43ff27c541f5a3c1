"""Quotas of programs that are alone, beside others, and of a slice of four that come and go."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.experiments.quotas import Real, whole
from tests.experiments.timed.cells import (
    PAIRS,
    PERIODS,
    QUOTAS,
    SECONDS,
    SETTLED,
    SETTLED_BESIDE,
    SETTLED_FIRST,
    SETTLED_FOUR,
    Cell,
    quota_text,
)
from tests.experiments.timed.results import Found

FULL_S, OWN_S = 2.0, 2.0
"""Seconds over which the speed of a program on a GPU of its own is measured, and what one that idles does of it."""
LOOK_S = 0.005
"""Seconds between two looks at what programs have done."""
REST_WEIGHT = 50
"""compute.weight of the one without a quota; the others have ten for each percent of theirs, so that each may have
it."""
REACHES = 1.03
"""Work of one that idles by its quota, at least, for that to hold it."""


class Ceilings:
    """The cells of quotas of one run."""

    def __init__(self, found: Found, directory: Path) -> None:
        self._found, self._real = found, Real(directory)

    def run(self, cells: Sequence[Cell]) -> None:
        """Measure these cells."""
        wanted = {one.name for one in cells}
        with self._real.tree() as self._binary:
            for way, kind in itertools.product(("library", "levers"), ("busy", "idle")):
                if mine := {name for name in wanted if name.startswith(f"quotas/{way}-{kind}/")}:
                    self._alone(way, kind, mine)
            for kind in ("busy", "idle"):
                if mine := {name for name in wanted if name.startswith(f"beside/{kind}/")}:
                    self._beside(kind, mine)
            for way in ("library", "levers"):
                if any(name.startswith(f"beside/forks-{way}/") for name in wanted):
                    self._forks(way)

    # Programs

    @contextlib.contextmanager
    def _program(self, way: str) -> Iterator[Any]:
        one = self._real.start(way, self._binary)
        try:
            self._real.ready(one)
            yield one
        finally:
            self._real.stop([one])

    @contextlib.contextmanager
    def _resting(self, kind: str, those: Sequence[Any]) -> Iterator[None]:
        """Where it is one that idles, these work for 30 ms and rest for 20, again and again."""
        from tests.t7_nvidia.bursting import bursts

        over = threading.Event()
        threads = [threading.Thread(target=bursts, args=(one, over)) for one in those if kind == "idle"]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _file(self, one: Any, name: str) -> Path:
        return Path(self._real.mount.group(one.pid) / name)

    # Times

    def _window(self, those: Sequence[Any], full: float) -> tuple[list[float], list[list[tuple[float, float]]]]:
        """Return what each does of the time over SECONDS, of its speed alone, and what it had done by when."""
        rows: list[list[tuple[float, float]]] = [[] for _ in those]
        until = time.monotonic() + SECONDS
        while True:
            for each, one in zip(rows, those, strict=True):
                each.append((time.monotonic(), one.finished / full))
            if rows[0][-1][0] >= until:
                break
            time.sleep(LOOK_S)
        return [(each[-1][1] - each[0][1]) / (each[-1][0] - each[0][0]) for each in rows], rows

    def _row(self, cell: str, done: float, share: float, period_us: int, **more: Any) -> None:
        self._found.add("quota", cell, done=done, wanted=share, period_us=period_us, **more)

    # Cells

    def _alone(self, way: str, kind: str, names: set[str]) -> None:
        from tests.t7_nvidia.conftest import rates

        with self._program(way) as one, self._resting("busy", [one]):
            (full,) = rates(one, seconds=FULL_S)
            with self._resting(kind, [one]):
                own = rates(one, seconds=OWN_S)[0] / full if kind == "idle" else 1.0
                is_first = True
                for period_us, share in itertools.product(PERIODS, QUOTAS):
                    name = f"quotas/{way}-{kind}/{quota_text(share, period_us)}"
                    if name not in names:
                        continue
                    self._real.limit_of(self._file(one, "compute.max"), share, period_us)
                    time.sleep(SETTLED_FIRST if is_first else SETTLED[way])
                    is_first = False
                    (done,), (rows,) = self._window([one], full)
                    rate, cycles = whole(self._real.fresh()["begins"], rows)
                    more = {"own": own, "reaches": own >= REACHES * share, "whole": rate, "cycles": cycles}
                    self._row(name, done, share, period_us, **more)

    def _beside(self, kind: str, names: set[str]) -> None:
        from tests.t7_nvidia.conftest import rates

        with self._program("levers") as first:
            (full,) = rates(first, seconds=FULL_S)
            with self._program("library") as second, self._program("") as other:
                self._file(other, "compute.weight").write_text(f"{REST_WEIGHT}\n")
                with self._resting(kind, [first, second]):
                    for period_us, pair in itertools.product(PERIODS, PAIRS):
                        texts = [quota_text(share, period_us) for share in pair]
                        name = f"beside/{kind}/{'+'.join(texts)}"
                        if name in names:
                            self._pair(name, kind, (first, second, other), pair, period_us, full)

    def _pair(
        self, name: str, kind: str, those: Sequence[Any], pair: Sequence[float], period_us: int, full: float
    ) -> None:
        for one, share in zip(those, pair, strict=False):
            self._file(one, "compute.weight").write_text(f"{round(1000 * share)}\n")
            self._real.limit_of(self._file(one, "compute.max"), share, period_us)
        time.sleep(SETTLED_BESIDE)
        done, _ = self._window(those, full)
        print(f"{name}: the one without a quota {done[-1]:.4f}, all {sum(done):.4f}", flush=True)
        for way, each, share in zip(("levers", "library"), done, pair, strict=False):
            # One that idles has what it works, where others leave it less than its quota: then it may not be over it.
            reaches = kind == "busy" or share <= 0.3
            self._row(f"{name} {way}", each, share, period_us, own=each, reaches=reaches, others=done)

    def _forks(self, way: str) -> None:
        import os

        from tests.support.cgroups import cgroup, enter, slice_path
        from tests.t7_nvidia.conftest import rates, wait_for

        those, gone = list[Any](), [0]

        def begin(place: Path) -> Any:
            those.append(self._real.start(way, self._binary))
            enter(those[-1].pid, place)
            return those[-1]

        with cgroup(f"ggroup-forks-{os.getpid()}-{way}") as place:
            try:
                first = begin(place)
                self._real.ready(first)
                (full,) = rates(first, seconds=FULL_S)
                for _ in range(3):
                    self._real.ready(begin(place))
                file = self._real.mount / "slice" / slice_path(place) / "0" / "compute.max"
                wait_for(file.exists, "the slice is in the tree")
                self._real.limit_of(file, 0.3, PERIODS[0])
                time.sleep(SETTLED_FOUR[way])
                before, began, ended = sum(one.finished for one in those), time.monotonic(), 0
                while time.monotonic() < began + SECONDS:
                    time.sleep(1)
                    old = those.pop(0)
                    old.process.kill()
                    old.process.wait()
                    gone[0] += old.finished
                    old.file.unlink()
                    ended += 1
                    begin(place)
                done = (gone[0] + sum(one.finished for one in those) - before) / (time.monotonic() - began) / full
                name = f"beside/forks-{way}/{quota_text(0.3, PERIODS[0])}"
                self._row(name, done, 0.3, PERIODS[0], ended=ended)
            finally:
                self._real.stop(those)
