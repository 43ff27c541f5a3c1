"""The soak: checks of a mount that a crowd has used for a while. Run by `make soak`.

    python -m tests.bench.soak [--minutes M] [--processes N] [--only PART] [--json FILE]

Three parts, each on a mount of its own with the software GPU; everything together gets two CPUs:

load    1000 programs with a context and memory, 100 clients that read every file in a loop and 50 that write limits,
timeslices, weights and freezes in a loop, for ten minutes. Checked: there is no error, the time of a read (open, read,
close; that of read(2) alone is in the note), whether the daemon's memory and descriptors grow, and at the end, whether
every program is there and sums add up. sysfs   `stress-ng --sysfs` takes the tree for /sys: in a mount namespace, bound
over it. churn   100 programs a second come, allocate, run a kernel and end or are killed. Checked: how many a second
there were, whether one failed, and whether they left anything.

A read has to be answered within 20 ms in 99 of 100 cases; memory and descriptors may not grow.
Exit status: 0 all of it holds, 1 something does not, 2 measuring failed.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.leak import trend
from tests.bench.mounts import GGROUPFS, Server, build, first_line, mount
from tests.bench.report import BenchError, Report
from tests.support.mounted import Mounted

CPUS = 2
READERS, WRITERS = 100, 50
READ_BUDGET_MS = 20.0
RATE = 100
"""Programs per second that come and go."""
PATIENCE = 180.0
"""Seconds until a crowd is there."""
QUIET = 10.0
"""Seconds after the last write until all of its effects have settled."""
TREND, LEAK_MB = 600.0, 0.5
"""Period in seconds, and MB by which memory may not grow in it."""
ROUNDS = 1
"""Least number of stress-ng's rounds, each of which opens, reads, maps and polls every file of the tree."""
ROOT = Path(__file__).parents[2]
CROWD = [sys.executable, "-m", "tests.bench.crowd"]


@dataclass(frozen=True)
class Sample:
    """The daemon at one moment."""

    at: float
    """Value of time.monotonic()."""
    rss_mb: float
    descriptors: int


def sample(server: Server) -> Sample:
    return Sample(time.monotonic(), server.rss_mb(), len(os.listdir(f"/proc/{server.process.pid}/fd")))


def growth(samples: list[Sample]) -> tuple[float, float]:
    """Return the growth of memory in MB over `TREND` seconds, and the growth that counts as a leak: three standard
    errors, or `LEAK_MB`."""
    try:
        line = trend((one.at, one.rss_mb) for one in samples)
    except ValueError as error:
        raise BenchError(str(error)) from None
    return line.slope * TREND, max(3 * line.error * TREND, LEAK_MB)


def unlike(server: Server) -> str:
    """Return what is wrong with the tree, `QUIET` seconds after the last client has ended; nothing if all is well."""
    mounted = Mounted(server.mountpoint, server.process, [])
    end = time.monotonic() + QUIET
    while True:
        try:
            mounted.check()
        except AssertionError as error:
            if time.monotonic() > end:
                return str(error) or traceback.format_exc(limit=1)
        else:
            return ""
        time.sleep(0.1)


@contextlib.contextmanager
def started(words: Sequence[str | Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that says when it is ready, and ends with its standard input."""
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            if first_line(process, PATIENCE).strip() != b"ready":
                raise BenchError(f"{words}: not ready within {PATIENCE:.0f} s")
            yield process
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait()
        if process.returncode:
            raise BenchError(f"{words}: one of them ended by itself")


@dataclass(frozen=True)
class Soak:
    programs: dict[str, Path]
    processes: int
    seconds: float

    def crowd(self, server: Server) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return started([*CROWD, "stay", str(self.processes), server.mountpoint])

    def load(self, report: Report) -> None:
        with mount(GGROUPFS) as server, self.crowd(server):
            clients = self.programs["clients"]
            samples = [sample(server)]
            with (
                started([clients, "read", str(READERS), server.mountpoint]) as readers,
                started([clients, "write", str(WRITERS), server.mountpoint]) as writers,
            ):
                end, cpu = time.monotonic() + self.seconds, server.cpu_seconds()
                while time.monotonic() < end:
                    time.sleep(1)
                    server.check()
                    samples.append(sample(server))
                cpu = server.cpu_seconds() - cpu
                read, wrote = self.answers(readers), self.answers(writers)
            report.add("reads", read["count"] / self.seconds, "a second", None, f"{READERS} clients")
            report.add("writes", wrote["count"] / self.seconds, "a second", None, f"{WRITERS} clients")
            report.add("the daemon", cpu / self.seconds * 100, "% CPU")
            for name, found, budget in (("read", read, READ_BUDGET_MS), ("write", wrote, None)):
                keys = ("p50", "p999", "worst", f"{name}(2) p99")
                note = ", ".join(f"{key} {found[key] / 1e3:.2f}" for key in keys)
                report.add(f"{name}, p99", found["p99"] / 1e3, "ms", budget, note)
                errors = {key: value for key, value in found.items() if key.startswith("error")}
                report.add(f"{name}s that failed", sum(errors.values()), "", 0, str(errors or ""))
            self.flat(report, samples)
            there = sum(name.isdigit() for name in os.listdir(server.mountpoint))
            report.add("programs gone", self.processes - there, "", 0, f"of {self.processes}")
            wrong = unlike(server)
            report.add("sums that are wrong", bool(wrong), "", 0, wrong)
            self.silent(report, server)

    def answers(self, clients: subprocess.Popen[bytes]) -> dict[str, float]:
        """Return the clients' figures at the end."""
        assert clients.stdin
        assert clients.stdout
        clients.stdin.close()
        lines = clients.stdout.read().decode().splitlines()
        return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines)}

    def flat(self, report: Report, samples: list[Sample]) -> None:
        grown, budget = growth(samples)
        minutes = (samples[-1].at - samples[0].at) / 60
        note = f"from {samples[0].rss_mb:.1f} to {samples[-1].rss_mb:.1f} MB in {minutes:.1f} min"
        report.add(f"memory grows in {TREND / 60:.0f} min by", grown, "MB", budget, note)
        first, last = samples[0].descriptors, samples[-1].descriptors
        report.add("descriptors more than before", last - first, "", 0, f"{first}, then {last}")

    def silent(self, report: Report, server: Server) -> None:
        said = server.log.read_text()
        report.add("lines logged", len(said.splitlines()), "", 0, said[:200])

    def sysfs(self, report: Report) -> None:
        with mount(GGROUPFS) as server, self.crowd(server):
            before = sample(server)
            script = (
                f'mount --bind "$1" /sys && exec stress-ng --sysfs {CPUS} --timeout {self.seconds / 10:.0f} --metrics'
            )
            namespace = ["unshare", "--mount", "--propagation", "private"]
            words = [*namespace, "sh", "-c", script, "sh", os.fspath(server.mountpoint)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            server.check()
            rounds = [line.split() for line in (done.stdout + done.stderr).splitlines() if " sysfs " in line]
            report.add("stress-ng --sysfs, exit status", done.returncode, "", 0, (done.stderr or done.stdout)[-120:])
            report.add("... rounds", float(rounds[-1][4]) if rounds else 0, "", least=ROUNDS)
            after = sample(server)
            report.add("... descriptors more", after.descriptors - before.descriptors, "", 0)
            report.add(
                "... lines logged", len(server.log.read_text().splitlines()), "", 0, server.log.read_text()[:200]
            )

    def churn(self, report: Report) -> None:
        with mount(GGROUPFS) as server, self.crowd(server):
            before = set(os.listdir(server.mountpoint))
            samples = [sample(server)]
            seconds = self.seconds / 5
            done = threading.Event()

            def watch() -> None:
                while not done.wait(0.5):
                    samples.append(sample(server))

            watcher = threading.Thread(target=watch)
            watcher.start()
            words = [*CROWD, "pass", str(RATE), str(seconds), os.fspath(server.mountpoint)]
            try:
                found = subprocess.run(words, stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout.split()
            finally:
                done.set()
                watcher.join()
            ended, took, failed = int(found[0]), float(found[1]), int(found[2])
            # 1 % late, since the last programs have to end first.
            report.add("programs come and gone", 1e3 * took / ended, "ms each", 1010 / RATE, f"{ended} in {took:.1f} s")
            report.add("... that failed", failed, "", 0)
            end = time.monotonic() + 5
            while (left := set(os.listdir(server.mountpoint)) - before) and time.monotonic() < end:
                time.sleep(0.05)
            report.add("... that left something", len(left), "", 0, " ".join(sorted(left)[:5]))
            samples.append(sample(server))
            self.flat(report, samples)
            report.add(
                "... lines logged", len(server.log.read_text().splitlines()), "", 0, server.log.read_text()[:200]
            )


PARTS = {"load": Soak.load, "sysfs": Soak.sysfs, "churn": Soak.churn}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load; a tenth of sysfs, a fifth of churn")
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    return parser.parse_args()


def main() -> int:
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that everything is unwound
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CPUS])

    def parts(report: Report) -> None:
        with tempfile.TemporaryDirectory(prefix="ggroupfs-soak-") as directory:
            soak = Soak(build(Path(directory)), args.processes, args.minutes * 60)
            for name in args.only or PARTS:
                PARTS[name](soak, report)

    return Report().fill(parts, args.json)


if __name__ == "__main__":
    sys.exit(main())
