"""Quotas on a GPU, cell by cell, with what was charged by which part.

    OUT=DIR PYTHONPATH=$PWD python3 tests/experiments/quotas.py            all cells that fit into LIMIT_S (110) seconds
    CELLS="library" ... / CELLS="levers four-levers" ...     those whose names begin with one of these
    python3 tests/experiments/quotas.py --self-test    the same figures from simulated cells, without a GPU

Per cell: done/quota, then one line a program: done (of the time), charged (to accounts), page (its library's time with
kernels pending), could (chances), trace (time on the engine), net (less switches), stays; watched and busy (whole
samples), part; how often it stood and went on.
Then a line of the account: dropped (lost at the ends of periods), kept, over.
Raw samples, and all figures, are in $OUT.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.fspath(HERE))

from tests.experiments.celled import Cells  # noqa: E402

STATE = "GGROUP_PROBE"


class Probe:
    """Counts what the parts of a daemon do, by patches that also fit an older tree."""

    def __init__(self) -> None:
        self.each: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.levels: collections.Counter[str] = collections.Counter()
        self.raw: list[Any] = []
        self.begins: list[float] = []  # of cycles: periods that are strung together; CLOCK_MONOTONIC
        self.busy = threading.Lock()

    def install(self) -> None:
        from backend.nvidia import nvml, usage
        from backend.scheduler import fair, limiter, meter, quota

        probe, each = self, self.each
        look, learn, end = meter.Meters.look, meter.Meter.learn, meter.Meters.end
        owners: dict[int, int] = {}

        def new_look(self: Any, now_us: int, looks: Any) -> Any:
            looks = list(looks)
            before = {}
            for process, activity, _could in looks:
                one, of = self._each[process], each[process.pid]
                owners[id(one)] = process.pid
                before[process] = one.marks._each[-1].chances if one.marks._each else 0.0
                for name, value in (
                    ("page", getattr(activity, "pending_usec", None)),
                    ("trace", activity.gpu_usec),
                    ("stays", activity.stays),
                    ("watched", getattr(activity, "watched_usec", None)),
                    ("watched_busy", getattr(activity, "watched_busy_usec", None)),
                    ("sampled", activity.busy_sampled_usec),
                    ("busy", activity.busy_usec),
                ):
                    if value is not None:
                        of[name] = value
            found = look(self, now_us, looks)
            for process, us in found.items():
                one, of = self._each[process], each[process.pid]
                of["charged"] += us
                of["could"] += round((one.marks._each[-1].chances if one.marks._each else 0.0) - before[process])
                of["share_ppm"] = round(1e6 * one.share)
                watched = getattr(one, "watched", None)
                of["part_ppm"] = round(1e6 * (watched.part if watched is not None else getattr(one, "_busy", 1.0)))
                of["looks"] += 1
            return found

        def new_learn(self: Any, worked: float, chances: float, activity: Any) -> None:
            of, before = each[owners.get(id(self), 0)], self.known_us
            learn(self, worked, chances, activity)
            of["settled"] += round(worked)
            of["settled_could"] += round(chances)
            of["known"] += round(self.known_us - before)

        def new_end(self: Any, now_us: int, one: Any) -> int:
            found = end(self, now_us, one)
            each[one[0].pid]["charged"] += found
            return found

        meter.Meters.look, meter.Meter.learn, meter.Meters.end = new_look, new_learn, new_end  # type: ignore
        done, start = limiter.Limiter._done, limiter.Limiter._start
        since: dict[tuple[int, str], float] = {}

        def new_start(self: Any, process: Any, one: Any, act: Any) -> Any:
            since[process.pid, act.name] = time.monotonic()
            return start(self, process, one, act)

        def new_done(self: Any, process: Any, one: Any, act: Any) -> None:
            if act is not None:
                each[process.pid][act.name] += 1
                took = time.monotonic() - since.get((process.pid, act.name), time.monotonic())
                each[process.pid][f"{act.name}_us"] += round(took * 1e6)
            done(self, process, one, act)

        limiter.Limiter._done, limiter.Limiter._start = new_done, new_start  # type: ignore
        advance, slices = quota.Account.advance, fair.Fair.slices

        def new_advance(self: Any, now_us: int) -> int:
            ended = now_us >= self.began_us + self._span * self.period_us
            left, quotas, spans = self.left_us, self._span * self.quota_us, self._span
            found = advance(self, now_us)
            if ended:
                kept = self.left_us - self._span * self.quota_us
                probe.levels["periods"] += spans
                probe.levels["cycles"] += 1
                probe.levels["kept" if kept > 0 else "over"] += abs(kept)
                probe.levels["dropped"] += max(0, left - max(0, kept))
                probe.levels["quota"] += quotas
                probe.begins.append(time.monotonic() - (now_us - self.began_us) / 1e6)
            return found

        def new_slices(self: Any, *words: Any, **named: Any) -> Any:
            found = slices(self, *words, **named)
            probe.levels["rounds"] += 1
            probe.levels["short_rounds"] += bool(self._lively)
            for process, us in found.items():
                each[process.pid]["slice"] = us
            return found

        quota.Account.advance, fair.Fair.slices = new_advance, new_slices  # type: ignore
        inner = nvml.Nvml._busy

        def new_busy(self: Any, index: int) -> Any:
            module, since_us = self._nvml, self._since.get(index, 0)
            real, seen = module.nvmlDeviceGetProcessUtilization, []

            def asked(*words: Any) -> Any:
                answer = real(*words)
                seen.extend((int(one.pid), int(one.timeStamp), int(one.smUtil)) for one in answer)
                return answer

            module.nvmlDeviceGetProcessUtilization = asked
            try:
                return inner(self, index)
            finally:
                module.nvmlDeviceGetProcessUtilization = real
                with probe.busy:
                    probe.raw.append((round(time.time() * 1e6), since_us, seen))

        nvml.Nvml._busy = new_busy  # type: ignore
        self._usage = usage

    def snapshot(self) -> dict[str, Any]:
        with self.busy:
            raw = list(self.raw)
        return {
            "at": time.monotonic(),
            "each": {str(pid): dict(of) for pid, of in list(self.each.items())},
            "levels": dict(self.levels),
            "raw": raw[-400:],
            "begins": self.begins[-400:],
        }

    def write(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self.snapshot()))
        os.replace(new, path)

    def write_always(self, path: Path) -> None:
        while True:
            time.sleep(0.1)
            with contextlib.suppress(RuntimeError, OSError):  # a dict that grows meanwhile: the next time
                self.write(path)


def daemon(words: list[str]) -> None:
    """`-m ggroupfs mount ...` with a probe in it."""
    import runpy

    probe = Probe()
    probe.install()
    threading.Thread(target=probe.write_always, args=(Path(os.environ[STATE]),), daemon=True).start()
    sys.argv = ["ggroupfs", *words[2:]]
    runpy.run_module("ggroupfs", run_name="__main__", alter_sys=False)


def whole(begins: list[float], rows: list[tuple[float, float]]) -> tuple[float, int]:
    """Return what was done a second from the first to the last of those begins among rows of (time, done by then), and
    how many cycles that are. A part of one says nothing: its quota is used at its beginning, and it may be of 2 s."""
    there = [at for at in begins if rows[0][0] <= at <= rows[-1][0]]
    if len(there) < 2:
        return 0.0, 0

    def by(at: float) -> float:
        (t, x), (u, y) = next((i, j) for i, j in itertools.pairwise(rows) if i[0] <= at <= j[0])
        return x + (y - x) * (at - t) / max(1e-9, u - t)

    return (by(there[-1]) - by(there[0])) / (there[-1] - there[0]), len(there) - 1


def text(name: str, seconds: float, wanted: float, done: dict[int, float], a: Any, b: Any) -> str:
    """A cell's lines."""
    total = sum(done.values())
    lines = [f"== {name}: {total:.4f} of {wanted} ({100 * (total / wanted - 1):+.1f} %)"]
    for pid, part in done.items():
        x, y = a["each"].get(str(pid), {}), b["each"].get(str(pid), {})
        if not y:
            lines.append(f"   {pid}: done {part:.4f}, no quota")
            continue

        def grew(key: str) -> float:
            return (y.get(key, 0) - x.get(key, 0)) / 1e6 / seconds  # noqa: B023

        stays = y.get("stays", 0) - x.get("stays", 0)
        acts = {k: y.get(k, 0) - x.get(k, 0) for k in ("SPEND", "STOP", "RESTORE")}
        took = {k: (y.get(f"{k}_us", 0) - x.get(f"{k}_us", 0)) / 1e3 / n for k, n in acts.items() if n}
        per_stay = 1e6 * (grew("trace") - part) * seconds / stays if stays else 0
        lines.append(
            f"   {pid}: done {part:.4f} charged {grew('charged'):.4f} known {grew('known'):.4f} page {grew('page'):.4f}"
            f" could {grew('could'):.4f} trace {grew('trace'):.4f} net {grew('trace') - 197e-6 * stays / seconds:.4f}"
            f" stays {stays} ({per_stay:.0f} us each by work) slice {y.get('slice', 0)}"
        )
        lines.append(
            f"      samples: summed {grew('sampled'):.4f} watched {grew('watched'):.3f} busy {grew('watched_busy'):.3f}"
            f" part {y.get('part_ppm', 0) / 1e6:.3f} share {y.get('share_ppm', 0) / 1e6:.3f};"
            f" stood {acts['SPEND']}/{acts['STOP']} went on {acts['RESTORE']}"
            f" ms { ({k: round(v, 2) for k, v in took.items()}) }"
        )
    levels = {k: b["levels"].get(k, 0) - a["levels"].get(k, 0) for k in b["levels"]}
    us = {k: round(levels.get(k, 0) / 1e6 / seconds, 4) for k in ("quota", "kept", "over", "dropped")}
    counts = {k: levels.get(k, 0) for k in ("periods", "cycles", "short_rounds", "rounds")}
    lines.append(f"   account {us} {counts}")
    new = [one for one in b["raw"] if not a["raw"] or one[0] > a["raw"][-1][0]]
    stamps = sorted({s for _, _, seen in new for _, s, _ in seen})
    gaps = sorted(round((j - i) / 1e3) for i, j in itertools.pairwise(stamps))
    if gaps:
        ages = sorted(round((at - max(s for _, s, _ in seen)) / 1e3) for at, _, seen in new if seen)
        most = max(len(seen) for _, _, seen in new)
        utils = [u for _, _, seen in new for _, _, u in seen][:24]
        tops = collections.Counter(gaps).most_common(6)
        lines.append(
            f"   nvml: {len(new)} answers, {len(stamps)} samples, apart ms {gaps[0]}/{gaps[len(gaps) // 2]}/{gaps[-1]}"
            f" often {tops}, age ms {ages[0]}/{ages[len(ages) // 2]}/{ages[-1]}, entries {most}, util {utils}"
        )
    return "\n".join(lines)


class Real:
    """Cells on a GPU."""

    def __init__(self, out: Path) -> None:
        self.out, self.cells = out, Cells(out / "cells.json", 110)

    def state(self) -> Any:
        return json.loads(self.probe.read_text())

    def fresh(self) -> Any:
        """As of now: the daemon writes ten times a second."""
        now = time.monotonic()
        while (state := self.state())["at"] < now:
            time.sleep(0.01)
        return state

    def cell(self, name: str, wanted: float, full: float, those: list[Any], settle: float, seconds: float) -> None:
        time.sleep(settle)
        a, counts, began = self.fresh(), [one.finished for one in those], time.monotonic()
        rows = []
        while time.monotonic() < began + seconds:
            rows.append((time.monotonic(), [one.finished for one in those]))
            time.sleep(0.002)
        took, after, b = time.monotonic() - began, [one.finished for one in those], self.fresh()
        done = {one.pid: (y - x) / took / full for one, x, y in zip(those, counts, after, strict=True)}
        limited = {one.pid for one in those if getattr(one, "limited", True)}
        lines = text(name, took, wanted, {pid: part for pid, part in done.items() if pid in limited}, a, b)
        mine = [n for n, one in enumerate(those) if one.pid in limited]
        rate, cycles = whole(b["begins"], [(at, sum(each[n] for n in mine) / full) for at, each in rows])
        lines += f"\n   {rate:.4f} over {cycles} whole cycles"
        others = {pid: round(part, 4) for pid, part in done.items() if pid not in limited}
        print(lines + (f"\n   others {others}" if others else ""), flush=True)
        self.cells.note(name, {"done": done, "before": a, "after": b, "seconds": took})

    @contextlib.contextmanager
    def tree(self) -> Iterator[Path]:
        """Mount a tree whose daemon has a probe in it, and yield the built file that programs run."""
        import shutil

        import tests.support.mounted as support

        wrapper = self.out / "daemon.sh"
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" --daemon "$@"\n')
        wrapper.chmod(0o755)
        self.probe = self.out / "probe.json"
        os.environ[STATE] = os.fspath(self.probe)

        class Named:
            executable = os.fspath(wrapper)

        support.sys = Named  # type: ignore
        binary = self.out / "worker"
        subprocess.run(["nvcc", "-O2", "-o", binary, HERE / "tests/t7_nvidia/worker.cu", "-lcuda"], check=True)
        place = Path(tempfile.mkdtemp(prefix="ggroup-"))
        try:
            with support.mounted(place, gpu="nvidia", expect_errors=("",)) as self.mount:
                yield binary
                print("".join(self.mount.errors)[-1500:])
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def run(self) -> None:
        with self.tree() as binary:
            for way in ("library", "levers"):
                self.one(way, binary)
            for way in ("library", "levers"):
                if self.cells.wants(f"four-{way}", 24):
                    self.four(way, binary)

    def start(self, way: str, binary: Path, limited: bool = True) -> Any:
        import mmap
        import struct

        from tests.t7_nvidia.conftest import WANT, Worker
        from tests.t7_nvidia.programs import run_in

        file = Path(f"/dev/shm/ggroupfs-x-{os.getpid()}-{time.monotonic_ns()}")
        file.write_bytes(bytes(4096))
        with file.open("r+b") as opened:
            page = mmap.mmap(opened.fileno(), 4096)
        struct.pack_into("<I", page, WANT, 1)
        words = [*(run_in(self.mount) if way == "library" else ()), os.fspath(binary), os.fspath(file), "500"]

        class Mine(Worker):
            pass

        one = Mine(subprocess.Popen(words, stderr=subprocess.DEVNULL), page)
        one.file, one.limited = file, limited  # type: ignore
        return one

    def ready(self, one: Any) -> None:
        from tests.t7_nvidia.programs import group_of

        group_of(self.mount, one)

    def stop(self, those: list[Any]) -> None:
        for one in those:
            one.process.kill()
            one.process.wait()
            one.file.unlink()

    def limit_of(self, file: Path, share: float, period: int) -> None:
        file.write_text(f"{round(share * period)} {period}\n")

    def one(self, way: str, binary: Path) -> None:
        from tests.t7_nvidia.conftest import rates

        cells = [(f"{way}-alone-{x}", x, 100_000) for x in (0.3, 0.5 if way == "levers" else 0.8)]
        if not any(
            self.cells.wants(name, 20) for name in (*(name for name, _, _ in cells), f"{way}-bursts", f"{way}-beside")
        ):
            return
        those = [self.start(way, binary)]
        try:
            one = those[0]
            self.ready(one)
            (full,) = rates(one, seconds=2)
            file = self.mount.group(one.pid) / "compute.max"
            for name, share, period in cells:
                if self.cells.wants(name, 11):
                    self.limit_of(file, share, period)
                    self.cell(name, share, full, [one], 4, 6)
            if self.cells.wants(f"{way}-bursts", 13):
                from tests.t7_nvidia.bursting import bursts

                over = threading.Event()
                thread = threading.Thread(target=bursts, args=(one, over))
                thread.start()
                file.write_text("max\n")
                time.sleep(0.3)
                self.limit_of(file, 0.3, 100_000)
                self.cell(f"{way}-bursts", 0.3, full, [one], 6, 6)
                over.set()
                thread.join()
                one.set(140, 0)
            if self.cells.wants(f"{way}-beside", 12):
                self.limit_of(file, 0.3, 100_000)
                those.append(self.start("", binary, limited=False))
                self.ready(those[1])
                self.cell(f"{way}-beside", 0.3, full, those, 4, 6)
        finally:
            self.stop(those)

    def four(self, way: str, binary: Path) -> None:
        from tests.support.cgroups import cgroup, enter, slice_path
        from tests.t7_nvidia.conftest import rates, wait_for

        those: list[Any] = []
        with cgroup(f"ggroup-x-{os.getpid()}-{way}") as place:
            try:
                those.append(self.start(way, binary))
                self.ready(those[0])
                (full,) = rates(those[0], seconds=2)
                those += [self.start(way, binary) for _ in range(3)]
                for one in those:
                    one.started()
                    enter(one.pid, place)
                    self.ready(one)
                file = self.mount / "slice" / slice_path(place) / "0" / "compute.max"
                wait_for(file.exists, "the slice is in the tree")
                self.limit_of(file, 0.3, 100_000)
                self.cell(f"four-{way}", 0.3, full, those, 6 if way == "library" else 10, 6)
            finally:
                self.stop(those)


def self_test() -> None:
    """Two cells over a simulated GPU, and the lines of both."""
    import trio
    import trio.testing

    from tests.support.harness import looks_at_once
    from tests.support.quota_real import Real as Bench
    from tests.support.quotas import limited

    steps = [(n / 10, 0.6 * min(n, 10) / 10 if n < 20 else 0.6 + 0.12 * (n - 20) / 4) for n in range(25)]
    rate, cycles = whole([0.0, 2.0, 2.4, 2.9], steps)  # one of 2 s, and one of 0.4
    assert abs(rate - 0.3) < 1e-6
    assert cycles == 2
    probe, bodies = Probe(), list[subprocess.Popen[bytes]]()
    probe.install()

    def spawn() -> subprocess.Popen[bytes]:
        bodies.append(subprocess.Popen(["sleep", "600"]))
        return bodies[-1]

    async def main(library: bool) -> str:
        probe.each.clear()
        async with limited(spawn, gpu=Bench()) as p:
            one, other = await p.program(library=library), await p.program(library=False)
            await p.h.write(f"{one.pid}/0/compute.max", "30000 100000")
            await trio.sleep(4)
            a = json.loads(json.dumps(probe.snapshot()))
            found = await p.shares([one, other], 4)
            return text(f"{library=}", 4, 0.3, {one.pid: found[0]}, a, json.loads(json.dumps(probe.snapshot())))

    try:
        for library in (True, False):
            with looks_at_once():
                lines = trio.run(main, library, clock=trio.testing.MockClock(autojump_threshold=0))
            print(lines)
            assert " charged 0.2" in lines or " charged 0.3" in lines
    finally:
        for body in bodies:
            body.kill()
            body.wait()
    print("ok")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--daemon"]:
        daemon(sys.argv[2:])
    elif sys.argv[1:] == ["--self-test"]:
        self_test()
    else:
        directory = Path(os.environ.get("OUT") or tempfile.mkdtemp())
        Real(directory).run()
