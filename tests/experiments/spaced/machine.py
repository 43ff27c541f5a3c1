"""What cells of `space_gpu.py` run on: a GPU and its programs, built; or a software GPU and ones that pretend."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.experiments import bursts
from tests.experiments.spaced.cells import COUNT

ROOT = Path(__file__).resolve().parents[3]
ZOO = ROOT / "tests" / "bench" / "papers" / "programs" / "zoo.py"
KINDS = {"eighth": ("200", "8"), "loop": ("5", "1", "own", "32")}
"""Words of placed.cu for each kind of small programs."""
FILL_US = 200
"""Microseconds of a kernel of what fills."""
LOADED_S, END_S = 90.0, 10.0
"""Longest wait for a program to work, and for programs to end, seconds."""


class Machine:
    """A host with a GPU."""

    def __init__(self, directory: Path) -> None:
        """`directory` is for what is built."""
        self._directory = directory
        self.requests = self.placed = ""
        self._rounds: dict[str, int] = {}  # of kernels of requests.cu, as the first of each kind found them

    def build(self) -> None:
        """Build the library and the programs."""
        self.requests = bursts.build()
        self.placed = os.fspath(self._directory / "placed")
        source = ROOT / "tests" / "t7_nvidia" / "placed.cu"
        subprocess.run(["nvcc", "-O2", "-o", self.placed, source, "-lcuda"], check=True)

    # Trees and slices

    @contextlib.contextmanager
    def tree(self) -> Iterator[Any]:
        """Mount a tree; its daemon may log what it likes, and is told of below."""
        from tests.support.mounted import Mounted, kill, mounted, mountpoint

        with mountpoint() as place:
            mount: Mounted | None = None
            try:
                with mounted(place, gpu=self.gpu, expect_errors=("",)) as mount:
                    yield mount
            finally:
                if mount is not None:
                    if mount.daemon.poll() is None:  # it did not end in time
                        kill(mount)
                        subprocess.run(["fusermount3", "-u", "-z", place], check=False)
                    print("".join(mount.errors)[-1500:], flush=True)

    gpu = "nvidia"
    """The GPU of mounts."""

    def inside(self, mount: Any, within: str | None = None) -> list[str]:
        """Return the words before a program with the library, in a slice if one is named."""
        from tests.t7_nvidia.programs import run_in

        return run_in(mount, within=within)

    @contextlib.contextmanager
    def way(self, name: str) -> Iterator[Sequence[str]]:
        """Yield the words before programs that share the GPU without ggroupfs: by time slices, or MPS."""
        if name == "slices":
            yield []
            return
        from tests.bench.gpu.faces import Part
        from tests.bench.gpu.systems import Mps

        with Mps().enter() as stage:
            yield stage.words(Part())

    # Programs

    def small(self, kind: str) -> list[str]:
        """Return the words of a small program."""
        if kind == "resnet":
            return [sys.executable, os.fspath(ZOO), "PAGE", "resnet18", "infer", "--batch", "1"]
        return [self.placed, "PAGE", *KINDS[kind]]

    @contextlib.contextmanager
    def eight(self, before: Sequence[str], kind: str, count: int = COUNT) -> Iterator[list[Any]]:
        """Run small programs, which all work on return."""
        from tests.t7_nvidia.placing import SIZE
        from tests.t7_nvidia.programs import program

        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(program(*before, *self.small(kind), size=SIZE)) for _ in range(count)]
            stack.callback(ended, runs)
            for run in runs:
                works(run)
            yield runs

    @contextlib.contextmanager
    def one(self, before: Sequence[str], *words: str) -> Iterator[Any]:
        """Run placed.cu with these words."""
        from tests.t7_nvidia.placing import SIZE
        from tests.t7_nvidia.programs import program

        with program(*before, self.placed, "PAGE", *words, size=SIZE) as run, stopped(run):
            works(run)
            yield run

    @contextlib.contextmanager
    def leader(self, before: Sequence[str], service_us: int) -> Iterator[Any]:
        """Run a program that serves requests; the first one is to be alone on the GPU, to know how long its kernels
        are."""
        from tests.t7_nvidia.conftest import wait_for
        from tests.t7_nvidia.programs import program
        from tests.t7_nvidia.requested import ALONE_NS, KERNELS, ROUNDS, SIZE

        words = [self.requests, "PAGE", "serve", str(service_us), str(KERNELS), *self._known("serve")]
        with program(*before, *words, size=SIZE) as run:
            wait_for(lambda: run.u64(ALONE_NS) > 0 or run.process.poll() is not None, "it serves", seconds=LOADED_S)
            assert run.process.poll() is None
            self._rounds.setdefault("serve", run.u32(ROUNDS))
            with stopped(run):
                yield run

    @contextlib.contextmanager
    def filler(self, before: Sequence[str]) -> Iterator[Any]:
        """Run a program that fills the GPU."""
        from tests.t7_nvidia.programs import program
        from tests.t7_nvidia.requested import ROUNDS, SIZE

        words = [self.requests, "PAGE", "fill", str(FILL_US), *self._known("fill")]
        with program(*before, *words, size=SIZE) as run, stopped(run):
            works(run)
            self._rounds.setdefault("fill", run.u32(ROUNDS))
            yield run

    def _known(self, kind: str) -> list[str]:
        return [str(self._rounds[kind])] if kind in self._rounds else []

    def group(self, mount: Any, run: Any) -> Any:
        """Return the control files of a program, once they are there."""
        from tests.t7_nvidia.programs import member

        return member(mount, run)


@contextlib.contextmanager
def stopped(run: Any) -> Iterator[None]:
    """Have a program end at the end."""
    try:
        yield
    finally:
        ended([run])


def ended(runs: Sequence[Any]) -> None:
    """Have programs end by themselves, as far as they do: a client of MPS that is killed may end others. Those that do
    not are killed after that.
    """
    from tests.t7_nvidia.programs import STOP

    until = time.monotonic() + END_S
    for run in runs:
        run.set(STOP, 1)
    for run in runs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(max(0.01, until - time.monotonic()))


def works(run: Any) -> None:
    """Wait until a program works."""
    from tests.t7_nvidia.conftest import wait_for

    wait_for(lambda: run.passes > 2 or run.process.poll() is not None, "it works", seconds=LOADED_S)
    assert run.process.poll() is None, f"it ended with {run.process.returncode}"


PRETENDS = """#!{python}
# A tenant of a software GPU that reports as placed.cu does, and knows its SMs by its own control files.
import mmap, os, struct, sys, threading, time
from pathlib import Path
sys.path[:0] = {path!r}
from ggroupfs.cli import main
KEPT, place = 4096, Path(os.environ["GGROUP_DRY"])
file = open(sys.argv[1], "r+b")
page = mmap.mmap(file.fileno(), 0)
def report():
    group, known, mask = place / str(os.getpid()) / "0", 0, 132
    struct.pack_into("<I", page, 36, mask)
    while not struct.unpack_from("<I", page, 24)[0]:
        time.sleep(0.002)
        try:
            stat = dict(line.split() for line in (group / "gcgroup.stat").read_text().splitlines())
            text, finished = (group / "compute.sm.max").read_text().strip(), int(stat["finished"])
        except (OSError, KeyError):
            continue
        sms = 132 if text == "max" else int(text)
        for number in range(known, finished):
            struct.pack_into("<Q", page, 4096 + 8 * (number % KEPT), number + 1 << 16 | sms)
            struct.pack_into("<Q", page, 4096 + 8 * KEPT + 8 * (number % KEPT), time.monotonic_ns())
        for word in range(3):
            struct.pack_into("<Q", page, 40 + 8 * word, (1 << sms) - 1 >> 64 * word & (1 << 64) - 1)
        known = finished
        struct.pack_into("<Q", page, 0, finished)
    os._exit(0)
threading.Thread(target=report).start()
sys.argv = ["ggroupfs", "tenant", "--mount", os.fspath(place), "--gmem", "16M", "--kernel", "10ms", "--depth", "8"]
sys.exit(main())
"""


class Pretending(Machine):
    """A host without a GPU: programs are tenants of a software GPU; the one that serves only pretends."""

    gpu = "soft"

    def build(self) -> None:
        """Write the programs."""
        for name, text in (("requests", bursts.FAKE), ("placed", PRETENDS)):
            path = self._directory / name
            path.write_text(text.replace("{python}", sys.executable).replace("{path!r}", repr(sys.path)))
            path.chmod(0o755)
        self.requests, self.placed = os.fspath(self._directory / "requests"), os.fspath(self._directory / "placed")

    def inside(self, mount: Any, within: str | None = None) -> list[str]:
        """Return the words before a program that is in the slice itself: there is no library."""
        from tests.support.cgroups import cgroup2

        words = ["env", f"GGROUP_DRY={mount.path}"]
        if within is not None:
            enter = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
            words = ["sh", "-c", enter, os.fspath(cgroup2() / within), *words]
        return words

    @contextlib.contextmanager
    def way(self, name: str) -> Iterator[Sequence[str]]:
        """Yield the words for tenants that have turns; there is no MPS."""
        assert name == "slices", "there is no MPS"
        with self.tree() as mount:
            yield self.inside(mount)

    def small(self, kind: str) -> list[str]:
        """Return the words of a tenant, whatever it is to do."""
        return [self.placed, "PAGE", kind]

    @contextlib.contextmanager
    def filler(self, before: Sequence[str]) -> Iterator[Any]:
        """Run a tenant that always has work."""
        with self.one(before, "fill") as run:
            yield run

    def group(self, mount: Any, run: Any) -> Any:
        """Return the control files of a program; None of one that is not in the tree."""
        from ggroupfs.client import Member
        from tests.support.mounted import eventually

        if os.fspath(self.requests) in Path(f"/proc/{run.pid}/cmdline").read_text().split("\0"):
            return None
        path = mount.group(run.pid)
        eventually(path.exists, "it is in the tree", 20)
        return Member(run.pid, 0, path)


def rates(runs: Sequence[Any], seconds: float) -> list[float]:
    """Return what each does a second from now on; AssertionError where one ends meanwhile."""
    before, start = [run.passes for run in runs], time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - start
    found = [(run.passes - was) / took for run, was in zip(runs, before, strict=True)]
    assert all(run.process.poll() is None for run in runs), "one has ended"
    return found
