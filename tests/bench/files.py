"""The file benchmark: the cost of a control file, compared with budgets. Run by `make bench-files`.

    python -m tests.bench.files [--json FILE] [--quick] [--only PART] [--command CMD]

Five parts, all against real mounts on this machine:

latency   pread, cat (open+read+close), stat, pwrite and echo, by a C client, on ggroupfs and on a minimal C
          low-level libfuse server (baseline.c); also pwrite of two values in turn, each of which is a line of the
          journal ("other"). Servers and client share one CPU, as wake-ups across CPUs would hide everything else. The
          two servers are measured in turn, in many short rounds; a figure is the median over the rounds, a ratio is the
          median of each round's own ratio, so slow drift cancels out. The notes also have the CPU time of server and
          client together, which other work on the machine affects less than the clock.
listing   opendir, readdir and closedir of 1000 processes, on both, in the same way.
requests  FUSE requests of one `cat` and one `echo`, from libfuse's debug log. Exact.
thousand  1000 processes: `ls -l` of the root (median of 9 runs after the first), the idle daemon's CPU time over 10 s.
many      10,000 processes: the daemon's resident memory after one `ls -l`; idle again.

Budgets are ratios or counts where they can be: absolute times move twofold between machines.
Exit status: 0 all budgets hold, 1 one does not, 2 measuring failed.
"""

import argparse
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bench import opcodes
from tests.bench.mounts import GGROUPFS, Server, build, mount, pin, processes
from tests.bench.report import BenchError, Report

OPERATIONS = ("pread", "cat", "stat", "pwrite", "echo", "other")
RATIO_BUDGETS = {"pread": 2.0, "cat": 2.2, "pwrite": 2.5, "echo": 2.5, "list": 9.0}
REQUEST_BUDGETS = {"first cat": 4, "later cat": 5, "echo": 3, "stat again": 0}
LS_BUDGET_MS = 50.0
RSS_BUDGET_MB = 200.0
IDLE_BUDGET_PERCENT = 1.0
WRITE = "8589934592"


@dataclass(frozen=True)
class Timed:
    us: list[float]  # p50, p99, minimum
    cpu_us: float  # of server and client together, per call


@dataclass(frozen=True)
class Bench:
    programs: dict[str, Path]
    command: list[str]
    rounds: int
    calls: int
    cpu: int
    idle_seconds: float

    def latency(self, report: Report) -> None:
        """Run in a process of its own (see part()), because it pins itself to one CPU."""
        pin(self.cpu)
        with ExitStack() as stack:
            ours = stack.enter_context(mount(self.command))
            theirs = stack.enter_context(mount([str(self.programs["baseline"])]))
            pid = os.getpid()
            ours.add([pid])
            for op in OPERATIONS:
                self.compare(report, op, (ours, ours.file(pid)), (theirs, theirs.file(pid)), calls=self.calls)

    def listing(self, report: Report) -> None:
        """Run in a process of its own as well."""
        pin(self.cpu)
        with ExitStack() as stack:
            pids = stack.enter_context(processes(self.programs["processes"], 1000))
            ours = stack.enter_context(mount(self.command))
            theirs = stack.enter_context(mount([str(self.programs["baseline"])]))
            ours.add(pids)
            self.compare(report, "list", (ours, ours.mountpoint), (theirs, theirs.mountpoint), calls=self.calls // 50)

    def compare(self, report: Report, op: str, *sides: tuple[Server, Path], calls: int) -> None:
        rounds = [tuple(self.client(*side, op, calls) for side in sides) for _ in range(self.rounds)]
        ratio = statistics.median(a.us[0] / b.us[0] for a, b in rounds)
        of_cpu = statistics.median(a.cpu_us / b.cpu_us for a, b in rounds)
        figures = ["/".join(f"{statistics.median(r[i].us[n] for r in rounds):.1f}" for n in range(3)) for i in (0, 1)]
        cpu = [statistics.median(r[i].cpu_us for r in rounds) for i in (0, 1)]
        note = f"p50/p99/min us: {figures[0]}, C {figures[1]}; CPU us: {cpu[0]:.1f}, C {cpu[1]:.1f}: {of_cpu:.2f} times"
        report.add(f"{op} p50 against C", ratio, "times", RATIO_BUDGETS.get(op), note)

    def client(self, server: Server, path: Path, op: str, calls: int) -> Timed:
        arguments: list[str | Path] = [self.programs["client"], path, WRITE, str(calls), op]
        served = server.cpu_ns()
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if done.returncode:
            server.check()
            raise BenchError(f"client: {done.stderr}")
        _, *us, cpu_us = done.stdout.split()
        served_us = (server.cpu_ns() - served) / 1e3 / (calls + calls // 10 + 1)
        return Timed([float(one) for one in us], served_us + float(cpu_us))

    def requests(self, report: Report) -> None:
        with mount(self.command, "debug") as server:
            server.add([os.getpid()])
            for name, sent in opcodes.count(server, os.getpid(), WRITE).items():
                note = " ".join(opcode if n == 1 else f"{opcode}*{n}" for opcode, n in sent.items())
                report.add(f"requests: {name}", sent.total(), "requests", REQUEST_BUDGETS.get(name), note)

    def thousand(self, report: Report) -> None:
        with processes(self.programs["processes"], 1000) as pids, mount(self.command) as server:
            report.add("mkdir of 1000 processes", server.add(pids) * 1e3, "ms")
            first, *later = (self.ls(server, 1000) for _ in range(10))
            note = f"first {first:.1f}, worst later {max(later):.1f}"
            report.add("ls -l of 1000 processes", statistics.median(later), "ms", LS_BUDGET_MS, note)
            report.add("memory, 1000 processes", server.rss_mb(), "MB")
            report.add("idle daemon, 1000 processes", self.idle(server), "% CPU", IDLE_BUDGET_PERCENT)
            start = time.perf_counter()
            entries = sum(len(dirs) + len(files) for _, dirs, files in os.walk(server.mountpoint))
            report.add("walk of the whole tree", (time.perf_counter() - start) * 1e3, "ms", None, f"{entries} entries")
            report.add("memory after the walk", server.rss_mb(), "MB")

    def many(self, report: Report) -> None:
        with processes(self.programs["processes"], 10_000) as pids, mount(self.command) as server:
            before = server.rss_mb()
            report.add("mkdir of 10,000 processes", server.add(pids) * 1e3, "ms")
            made = server.rss_mb()
            report.add("ls -l of 10,000 processes", self.ls(server, 10_000), "ms")
            note = f"empty tree {before:.1f}, directories made {made:.1f}, then ls -l"
            report.add("memory, 10,000 processes", server.rss_mb(), "MB", RSS_BUDGET_MB, note)
            report.add("idle daemon, 10,000 processes", self.idle(server), "% CPU")

    def ls(self, server: Server, entries: int) -> float:
        """Return the milliseconds, from its start, of one `ls -l` of the root, which must list `entries` processes."""
        start = time.perf_counter()
        listing = subprocess.run(["ls", "-l", server.mountpoint], capture_output=True, text=True, check=True).stdout
        took = (time.perf_counter() - start) * 1e3
        listed = sum(line.rpartition(" ")[2].isdigit() for line in listing.splitlines()[1:])
        if listed < entries:
            raise BenchError(f"ls -l lists {listed} processes of {entries}")
        return took

    def idle(self, server: Server) -> float:
        """Return the percent of one CPU that the daemon uses without requests, after one second to settle."""
        time.sleep(1)
        start, cpu = time.monotonic(), server.cpu_seconds()
        time.sleep(self.idle_seconds)
        return (server.cpu_seconds() - cpu) / (time.monotonic() - start) * 100


PARTS = {
    "latency": Bench.latency,
    "listing": Bench.listing,
    "requests": Bench.requests,
    "thousand": Bench.thousand,
    "many": Bench.many,
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a shorter idle time: for a first look")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part (may be repeated)")
    parser.add_argument(
        "--command", default=shlex.join(GGROUPFS), help="the server; gets [-o debug] MOUNTPOINT appended"
    )
    parser.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)), help="where latency is measured")
    return parser.parse_args()


def main() -> int:
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that everything is unwound
    every_cpu = os.sched_getaffinity(0)

    def parts(report: Report) -> None:
        with tempfile.TemporaryDirectory(prefix="ggroupfs-bench-") as directory:
            rounds, calls, idle_seconds = (5, 300, 3.0) if args.quick else (25, 1000, 10.0)
            command = shlex.split(args.command)
            bench = Bench(build(Path(directory)), command, rounds, calls, args.cpu, idle_seconds)
            for name in args.only or PARTS:
                try:
                    PARTS[name](bench, report)
                finally:
                    os.sched_setaffinity(0, every_cpu)

    return Report().fill(parts, args.json)


if __name__ == "__main__":
    sys.exit(main())
