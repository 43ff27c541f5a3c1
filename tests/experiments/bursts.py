#!/usr/bin/env python3
"""Busy periods on a GPU, by variants of their constants: p99 beside what fills by that alone, and what that keeps.

    python3 tests/experiments/bursts.py    on the GPU, as root; prints a line for each cell and variant
    python3 tests/experiments/bursts.py --self-test    without one: that variants act on a daemon

CELLS, VARIANTS: words, of those below; SECONDS of arrivals in each; FILL_US of a kernel of what fills; OUT: a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
OUT = Path(os.environ.get("OUT", "/tmp"))
BEGUN = time.monotonic()

# held_us: slice of a filler that is held; ahead_us: what it may have left as it launches more; hold_us: None: hold=no
VARIANTS: dict[str, dict[str, Any]] = {
    "today": {"held_us": 50, "ahead_us": 1200, "hold_us": 200},
    "slice": {"held_us": 1000, "ahead_us": 1200, "hold_us": 200},
    "ahead": {"held_us": 50, "ahead_us": 100, "hold_us": 200},
    "both": {"held_us": 1000, "ahead_us": 100, "hold_us": 200},
    "both2ms": {"held_us": 2000, "ahead_us": 100, "hold_us": 200},
    "both500us": {"held_us": 500, "ahead_us": 100, "hold_us": 200},
    "both150": {"held_us": 1000, "ahead_us": 150, "hold_us": 200},
    "both200": {"held_us": 1000, "ahead_us": 200, "hold_us": 200},
    "both300": {"held_us": 1000, "ahead_us": 300, "hold_us": 200},
    "long2ms": {"held_us": 2000, "ahead_us": 100, "hold_us": 200, "brief_us": 3000},  # for FILL_US of 1000 or more
    "hold400": {"held_us": 1000, "ahead_us": 100, "hold_us": 400},
    "hold100": {"held_us": 1000, "ahead_us": 100, "hold_us": 100},
    "no": {"held_us": 50, "ahead_us": 100, "hold_us": None},
    "stopped": {
        "held_us": 1000,
        "ahead_us": 100,
        "hold_us": 200,
    },  # the filler gets SIGSTOP: what leading costs by itself
}
DEFAULT = "today both both2ms stopped"


# ---- in the daemon


def inner(gpu: Any) -> Any:
    while hasattr(gpu, "_inner"):
        gpu = gpu._inner
    return gpu


def apply(scheduler: Any, knobs: dict[str, Any]) -> None:
    """Has a daemon go by other constants, and tells programs of it."""
    import backend.cuda.periods as periods
    import backend.scheduler.brief as brief
    import backend.scheduler.core as core

    core.HELD_US = knobs["held_us"]
    core.FILLER_US = knobs.get("filler_us", 50)
    brief.BRIEF_US = knobs.get("brief_us", 2000)
    brief.LONG_US = 1.5 * brief.BRIEF_US
    # What drains in many slices looks like one that is not held: only what is built is judged by that, and anew.
    is_judged = knobs["held_us"] >= 500 and knobs["ahead_us"] <= 200
    brief.STAYS_MOST = 2.5 if is_judged else 1e9
    for seen in scheduler._core._use._brief._seen.values():
        seen.distrusted, seen.stays, seen.periods, seen._next = 0, 0.0, 0.0, brief.DISTRUSTED_WINDOWS
    if knobs["ahead_us"] != periods.YIELD_AHEAD_US:
        periods.YIELD_AHEAD_US = knobs["ahead_us"]
        gpu = inner(scheduler._gpu)
        for program in gpu.managed._programs.values() if hasattr(gpu, "managed") else ():
            for slot, page in enumerate(program.ahead):
                if page is not None:
                    program.mover.follow(gpu.info.index, slot, page, knobs["ahead_us"])
    if scheduler._hold_us != knobs["hold_us"]:
        if knobs["hold_us"] is None:
            scheduler._gpu.rank({}, 0)
        scheduler._hold_us, scheduler._behind = knobs["hold_us"], {}
        scheduler.poke()


def run_daemon(knobs: Path, state: Path, words: list[str]) -> int:
    """`ggroupfs` with those words, in which knobs act at each look of the scheduler, and figures are written down."""
    from backend.process.identity import Member
    from backend.scheduler.scheduler import Scheduler
    from ggroupfs.cli import main

    original = Scheduler._samples
    last = [""]

    async def samples(self: Any, pace: Any) -> Any:
        found = await original(self, pace)
        if (text := knobs.read_text()) != last[0]:  # noqa: ASYNC240 - a few bytes in /tmp
            apply(self, json.loads(text))
            last[0] = text
        figures = {}
        for one in self._contenders:
            if not self._population.holds(Member(one.process, self._index)):
                continue
            activity = self._gpu.activity(one.process)
            place = self._follower.place(Member(one.process, self._index))
            figures[one.process.pid] = {
                "stays": activity.stays,
                "gpu_usec": activity.gpu_usec,
                "launches": activity.held_launches,
                "slice": place.timeslice_us,
                "off": place.off,
                "brief": self._core._use.is_brief(one.process),
                "periods": activity.busy_periods,
            }
        new = state.with_suffix(".new")
        new.write_text(json.dumps({"knobs": text, "of": figures}))
        new.replace(state)
        return found

    Scheduler._samples = samples  # type: ignore[method-assign]
    sys.argv = ["ggroupfs", *words]
    return main()


# ---- around it


class Tree:
    """A mount whose daemon goes by knobs."""

    def __init__(self, where: Path, gpu: str) -> None:
        self.knobs, self.state_path = where / "knobs", where / "state"
        self.path = where / "tree"
        self.path.mkdir()
        self.set(VARIANTS["both"])
        words = [sys.executable, __file__, "--daemon", str(self.knobs), str(self.state_path)]
        words += ["mount", "-f", "--gpu", gpu, str(self.path)]
        self.log = (OUT / "daemon.log").open("w")
        self.daemon = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.daemon.stdout is not None
        line = self.daemon.stdout.readline()
        assert line == "ready\n", (line, (OUT / "daemon.log").read_text()[-2000:])

    def set(self, knobs: dict[str, Any]) -> None:
        new = self.knobs.with_suffix(".new")
        new.write_text(json.dumps(knobs))
        new.replace(self.knobs)

    def of(self, pid: int) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self.state_path.read_text())["of"].get(str(pid), {}))
        return {}

    def group(self, pid: int, gpu: int = 0) -> Path:
        return self.path / str(pid) / str(gpu)

    def close(self) -> None:
        self.daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.daemon.wait(30)
        if self.daemon.poll() is None:
            self.daemon.kill()
            subprocess.run(["fusermount3", "-u", "-z", str(self.path)], check=False)
        self.log.close()


@contextlib.contextmanager
def tree(gpu: str) -> Iterator[Tree]:
    with tempfile.TemporaryDirectory(prefix="ggroup-b46-") as name:
        one = Tree(Path(name), gpu)
        try:
            yield one
        finally:
            one.close()


def spread(latencies: list[float], part: float) -> float:
    return sorted(latencies)[int(part * len(latencies))]


def told() -> str:
    return f"{time.monotonic() - BEGUN:5.1f}s"


def build() -> str:
    environment = {**os.environ}
    if Path("/usr/local/cuda/include/cuda.h").exists():
        environment.setdefault("CUDA_INCLUDE", "/usr/local/cuda/include")
    jobs = f"-j{os.cpu_count()}"
    library = subprocess.Popen(
        ["make", "-s", jobs, "-C", str(ROOT / "backend/cuda/library"), f"OUT={ROOT}/build/cuda"], env=environment
    )
    path = str(Path(tempfile.mkdtemp(prefix="ggroup-b46-")) / "requests")
    source = ROOT / "tests/t7_nvidia/requests.cu"
    subprocess.run(["nvcc", "-O2", "-I", ROOT / "backend/cuda/library", "-o", path, source, "-lcuda"], check=True)
    assert library.wait() == 0
    return path


FAKE = """#!{python}
import mmap, random, struct, sys, time
file = open(sys.argv[1], "r+b")
page = mmap.mmap(file.fileno(), 0)
def u32(at): return struct.unpack_from("<I", page, at)[0]
done = 0
if sys.argv[2] == "serve":
    struct.pack_into("<Q", page, 48, int(sys.argv[3]) * 1000)
while not u32(24):
    time.sleep(0.001)
    if sys.argv[2] == "fill":
        done += 5
        struct.pack_into("<Q", page, 0, done)
    elif u32(32) != u32(36):
        time.sleep(0.1)
        for n in range(u32(40)):
            struct.pack_into("<Q", page, 4096 + 8 * 8192 + 8 * n, int(1e6 * random.uniform(1, 9)))
        struct.pack_into("<I", page, 36, u32(32))
"""


def dry() -> None:
    """The whole of it with programs that only pretend, and the software GPU: nothing is measured."""
    import tests.t7_nvidia.programs as programs

    path = Path(tempfile.mkdtemp(prefix="ggroup-b46-")) / "requests"
    path.write_text(FAKE.replace("{python}", sys.executable))
    path.chmod(0o755)
    globals()["build"] = lambda: str(path)
    soft = tree
    globals()["tree"] = lambda gpu: soft("soft")
    programs.run_in = lambda mount: []  # type: ignore[assignment]
    programs.member = lambda mount, run: None  # type: ignore[assignment,return-value]
    programs.write = lambda *words: None  # type: ignore[assignment]
    experiment()


def experiment() -> None:
    import tests.t7_nvidia.requested as t7
    from tests.t7_nvidia.programs import member, program, rate, run_in, write

    t7.SECONDS = float(os.environ.get("SECONDS", "3"))
    fill_us = int(os.environ.get("FILL_US", t7.FILL_US))
    names = os.environ.get("CELLS", " ".join(str(cell) for cell in t7.CELLS)).split()
    variants = os.environ.get("VARIANTS", DEFAULT).split()
    cells = [cell for cell in t7.CELLS if str(cell) in names]
    requests = build()
    print(f"{told()} built; {t7.SECONDS:g} s each, kernels of {fill_us} us", flush=True)
    results: list[dict[str, Any]] = []

    def row(name: str, variant: str, **figures: Any) -> None:
        results.append({"cell": name, "variant": variant, **figures})
        text = " ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in figures.items()
            if not isinstance(value, list)
        )
        print(f"{told()} {name} {variant}: {text}", flush=True)
        (OUT / "experiment.json").write_text(json.dumps(results))

    def beside(
        mount: Tree, leaders: list[Any], other: Any, variant: str, wanted: list[list[int]]
    ) -> tuple[list[list[float]], dict[str, Any]]:
        periods = sum(mount.of(one.pid).get("periods") or 0 for one in leaders)
        before, passes, begun = mount.of(other.pid), other.passes, time.monotonic()
        found: list[list[float]] = [[] for _ in leaders]

        def serve(n: int) -> None:
            found[n] = t7.serve(leaders[n], wanted[n])

        threads = [threading.Thread(target=serve, args=(n,)) for n in range(len(leaders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        figures: dict[str, Any] = {"passes": other.passes - passes, "took": time.monotonic() - begun}
        time.sleep(0.4)  # the trace is 0.2 s late
        after = mount.of(other.pid)
        if before.get("stays") is not None and after.get("stays") is not None:
            figures["switches"] = after["stays"] - before["stays"]
        figures["periods"] = sum(mount.of(one.pid).get("periods") or 0 for one in leaders) - periods
        figures["slice"], figures["brief"] = after.get("slice"), after.get("brief")
        return found, figures

    def turn_to(mount: Tree, variant: str, other: Any) -> None:
        mount.set(VARIANTS[variant])
        time.sleep(0.8)  # a look, and what follows from it
        if variant == "stopped":
            os.kill(other.pid, signal.SIGSTOP)
            time.sleep(0.1)

    def back(variant: str, other: Any) -> None:
        if variant == "stopped":
            os.kill(other.pid, signal.SIGCONT)

    def run(mount: Tree, several: int, service_us: int, kinds: list[Any], chosen: list[str]) -> None:
        words = run_in(mount)  # type: ignore[arg-type]
        with contextlib.ExitStack() as stack:
            leaders: list[Any] = []
            for _ in range(several):  # one after the other: each measures how long its kernels take on a GPU of its own
                one = stack.enter_context(
                    program(*words, requests, "PAGE", "serve", str(service_us), str(t7.KERNELS), size=t7.SIZE)
                )
                leaders.append(one)
                t7.wait_for(
                    lambda one=one: one.u64(t7.ALONE_NS) > 0 or one.process.poll() is not None, "it serves", seconds=60
                )
                assert one.process.poll() is None
            wanted, alone = {}, {}
            for kind in kinds:
                service_s = leaders[0].u64(t7.ALONE_NS) / 1e9
                lists = [t7.arrivals(kind, service_s)]
                if several > 1:
                    lists = [t7.arrivals(t7.Cell(service_us, load, False, 0, 0), service_s) for load in (0.2, 0.21)]
                wanted[kind], got = lists, [[] for _ in leaders]
                threads = [
                    threading.Thread(
                        target=lambda n=n, got=got, lists=lists: got.__setitem__(n, t7.serve(leaders[n], lists[n]))
                    )
                    for n in range(several)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                alone[kind] = got
            other = stack.enter_context(program(*words, requests, "PAGE", "fill", str(fill_us), size=t7.SIZE))
            group = member(mount, other)  # type: ignore[arg-type]
            time.sleep(1)
            full = rate(other, 1.5)
            write(group, "compute.priority", 9)
            time.sleep(1.5)
            for variant in chosen:
                turn_to(mount, variant, other)
                for kind in kinds:
                    found, figures = beside(mount, leaders, other, variant, wanted[kind])
                    count = sum(map(len, wanted[kind]))
                    took, service_s = figures.pop("took"), leaders[0].u64(t7.ALONE_NS) / 1e9
                    ratios = [spread(a, 0.99) / spread(b, 0.99) for a, b in zip(found, alone[kind], strict=True)]
                    halves = [spread(a, 0.5) / spread(b, 0.5) for a, b in zip(found, alone[kind], strict=True)]
                    name = str(kind) if several == 1 else "two"
                    row(
                        name,
                        variant,
                        p99=max(ratios),
                        p50=max(halves),
                        share=t7.share(figures.pop("passes"), full, count, service_s, took),
                        requests=count,
                        **figures,
                        ms=[round(1e3 * x, 3) for one in found for x in one],
                        alone_ms=[round(1e3 * x, 3) for one in alone[kind] for x in one],
                    )
                back(variant, other)
            for one in (other, *leaders):
                one.finish()

    with tree("nvidia") as mount:
        for service_us in sorted({cell.service_us for cell in cells}):
            kinds = [cell for cell in cells if cell.service_us == service_us]
            few = [v for v in variants if v in ("today", "both")] or variants
            run(mount, 1, service_us, kinds, variants if service_us < 5000 else few)
        if "two" in names:
            run(mount, 2, 1550, [t7.Cell(1550, 0.2, False, 1.15, 0.0)], variants)
    best: dict[tuple[str, str], dict[str, Any]] = {(r["cell"], r["variant"]): r for r in results}
    print("p99/share by cell (rows) and variant")
    for name in dict.fromkeys(r["cell"] for r in results):
        parts = [f"{v} {best[name, v]['p99']:.3f}/{best[name, v]['share']:.3f}" for v in variants if (name, v) in best]
        print(f"{name:18}", "  ".join(parts))
    print(told())


def self_test() -> None:
    """Knobs act on a real daemon's scheduler, and on programs with the library (the double of the driver)."""
    from types import SimpleNamespace

    import trio

    from tests.support.mounted import Tenant, eventually
    from tests.t6_cuda.pairs import pair

    with tree("soft") as mount:
        options = ("--kernel", "2ms", "--depth", "64", "--report", "0.1")
        with Tenant(mount, *options) as one, Tenant(mount, *options) as other:  # type: ignore[arg-type]
            other.write("compute.priority", 9)
            for us in (70, 90):
                mount.set({**VARIANTS["both"], "filler_us": us})
                eventually(lambda us=us: mount.of(other.pid).get("slice") == us, f"a slice of {us} us", 20)
            assert mount.of(other.pid).keys() == {"stays", "gpu_usec", "launches", "slice", "off", "brief", "periods"}
            assert mount.of(one.pid)["gpu_usec"] is not None
    print("a daemon goes by its knobs, and tells what there is")

    async def main() -> None:
        with tempfile.TemporaryDirectory() as name:
            async with pair(Path(name), "") as two:
                two.rank(two.second)
                await two.daemon.until(lambda: "goes behind others: 0x1" in two.second.stderr(), "it goes behind", 20)
                seen = two.second.stderr().count("goes behind others")
                core = SimpleNamespace(_use=SimpleNamespace(_brief=SimpleNamespace(_seen={})))
                scheduler = SimpleNamespace(
                    _gpu=two.daemon.gpu, _hold_us=200, _behind={}, poke=lambda: None, _core=core
                )
                apply(scheduler, VARIANTS["both300"])
                await two.daemon.until(lambda: two.second.stderr().count("goes behind others") > seen, "told again", 20)
                apply(scheduler, VARIANTS["no"])
                await two.daemon.until(lambda: "goes behind others: 0\n" in two.second.stderr(), "behind none", 20)

    trio.run(main)
    print("programs with the library are told; ok")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--daemon"]:
        sys.exit(run_daemon(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
    elif sys.argv[1:] == ["--dry"]:
        dry()
    elif sys.argv[1:] == ["--self-test"]:
        self_test()
    else:
        experiment()
