"""The set-up of the file benchmark: the C programs built, the two servers mounted, real processes made.

Everything here is a context manager, so that a failure anywhere leaves no mount, no process and no directory behind.
Only processes started here are ended, by their own handle; only mountpoints made here are unmounted, by their path.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.report import BenchError

HERE = Path(__file__).parent
GGROUPFS = [sys.executable, "-m", "ggroupfs", "mount", "-f", "--gpu", "soft"]
PROGRAMS = ("baseline", "client", "clients", "processes")
START_DEADLINE = 30.0
STOP_DEADLINE = 20.0
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    """A mounted file system and the process that serves it."""

    mountpoint: Path
    process: subprocess.Popen[bytes]
    log: Path
    """Standard error of the server so far."""

    def file(self, pid: int, name: str = "gmem.limit.high") -> Path:
        return self.mountpoint / str(pid) / "0" / name

    def add(self, pids: list[int]) -> float:
        """Make the directories of the live processes `pids`; return the seconds that it took."""
        start = time.perf_counter()
        for pid in pids:
            os.mkdir(self.mountpoint / str(pid))
        return time.perf_counter() - start

    def rss_mb(self) -> float:
        """Return VmRSS in MB (10^6 bytes)."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise BenchError("the server has no VmRSS: it is gone")

    def cpu_seconds(self) -> float:
        """Return utime + stime of all its threads so far, in steps of one clock tick."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def cpu_ns(self) -> int:
        """Return the nanoseconds of its main thread, which serves requests, on a CPU so far (proc_pid_schedstat)."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0])

    def check(self) -> None:
        if self.process.poll() is not None:
            raise BenchError(f"the server ended with status {self.process.returncode}:\n{self.log.read_text()[-2000:]}")


def build(into: Path) -> dict[str, Path]:
    """Compile the C programs of this directory; return their paths by name."""
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=True)
    compiler = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra"]
    built = {name: into / name for name in PROGRAMS}
    for name, path in built.items():
        subprocess.run([*compiler, "-o", path, HERE / f"{name}.c", *shlex.split(flags.stdout)], check=True)
    return built


def pin(cpu: int) -> None:
    """Pin this process, and so all that it starts from now on, to one CPU."""
    os.sched_setaffinity(0, {cpu})


def first_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the first line of its stdout; b"" when it closed it or `deadline` seconds passed."""
    lines: list[bytes] = []
    assert process.stdout
    reader = threading.Thread(target=lambda out: lines.append(out.readline()), args=(process.stdout,), daemon=True)
    reader.start()
    reader.join(deadline)
    return lines[0] if lines else b""


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_DEADLINE)
    except subprocess.TimeoutExpired:
        print(f"warning: pid {process.pid} ignored SIGTERM for {STOP_DEADLINE:.0f} s", file=sys.stderr)
        process.kill()
        process.wait()


def unmount(mountpoint: Path) -> None:
    if os.path.ismount(mountpoint):
        subprocess.run(["fusermount3", "-u", "-z", mountpoint], check=False)


@contextmanager
def mount(command: list[str], options: str = "") -> Iterator[Server]:
    """Run `command [-o options] MOUNTPOINT` and yield once it has printed "ready"."""
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ggroupfs-bench-")))
        mountpoint = top / "mnt"
        mountpoint.mkdir()
        log = top / "stderr"
        with log.open("wb") as stderr:
            arguments = [*command, *(["-o", options] if options else []), str(mountpoint)]
            process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr)
        assert process.stdout
        stack.callback(process.stdout.close)
        stack.callback(unmount, mountpoint)
        stack.callback(stop, process)
        server = Server(mountpoint, process, log)
        line = first_line(process, START_DEADLINE)
        if line.strip() != b"ready":
            raise BenchError(f"{shlex.join(arguments)}: no `ready` but {line!r}:\n{log.read_text()[-2000:]}")
        yield server
        server.check()


@contextmanager
def processes(program: Path, number: int) -> Iterator[list[int]]:
    """Yield the pids of `number` new idle processes."""
    with subprocess.Popen([program, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout
            pids = [int(line) for line in iter(parent.stdout.readline, b"\n") if line]
            if len(pids) != number:
                raise BenchError(f"only {len(pids)} of {number} processes could be made")
            yield pids
        finally:
            assert parent.stdin
            parent.stdin.close()
