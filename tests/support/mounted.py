"""A real mount, served by a daemon of its own, and real tenants on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from backend.process.identity import start_time
from ggroupfs.client import Member, flat, members
from ggroupfs.fs.controls import CONTROLS
from ggroupfs.mounts import mount_of
from tests.support.stopwatch import Stopwatch

SLOW = int(os.environ.get("GGROUP_SLOW", "1"))
"""Factor by which this machine's processor is slower than a real one: it may be emulated in a virtual machine."""
SECONDS = 120.0
"""Seconds that anything here may take on a real processor before the test fails as hung. A busy machine is ten times
slower. Promises in seconds are measured with a Stopwatch."""
BUSY = ("--kernel", "2ms", "--depth", "4096", "--report", "0.1")
"""Options of a tenant that always has work for the GPU: seconds of it, however rarely the tenant gets a processor."""
LEFT_BEHIND = "unmounting what is left of another daemon"

LEDGER = os.environ.get("GGROUP_LEDGER")
"""Ledger that daemons are told to keep their books in; None: no option is given."""


@attrs.define
class Mounted:
    """A mounted tree."""

    path: Path
    """The mountpoint."""
    daemon: subprocess.Popen[Any]
    """The process that serves it."""
    errors: list[str]
    """Lines that the daemon wrote to standard error."""
    expected: Sequence[str] = ()
    """Words that mark such lines as no error."""

    def __truediv__(self, name: object) -> Path:
        return self.path / str(name)

    def group(self, pid: int, gpu: int = 0) -> Path:
        """Return the directory of a process's control files."""
        return self.path / str(pid) / str(gpu)

    def watch(self, *pids: int) -> Stopwatch:
        """Return a watch over the time that the daemon, this process and `pids` take, however busy the machine is."""
        return Stopwatch(self.daemon.pid, *pids)

    def members(self) -> list[Member]:
        """Return every process in the tree."""
        return list(members(self.path))

    def check(self) -> None:
        """Check invariants: sums add up on every GPU, and nothing is frozen unasked.

        A process that was waited for stays in the tree until the daemon has heard of its end, and memory that a raised
        limit gives back comes back a while after the write. So the check is repeated where a process ends, or memory
        moves, in the middle of it.
        """
        try:
            eventually(self._adds_up, "a look during which no process goes and no memory moves")
        finally:
            self.check_log()

    def check_log(self) -> None:
        """Check that the daemon has logged no error since the last check: a line fails one test, not those after it."""
        unexpected = [line for line in self.errors if not any(word in line for word in self.expected)]
        for line in unexpected:
            self.errors.remove(line)  # one by one, since others are added meanwhile
        assert not unexpected, unexpected

    def _adds_up(self) -> bool:
        """Return False where a process or memory came or went; OSError where a process that is being read has ended."""
        everybody = self.members()
        for gpu in sorted((self.path / "gpus").iterdir()):
            if gpu.is_symlink():
                continue
            held = [m for m in everybody if m.gpu == int(gpu.name)]
            currents = [int(member.read("gmem.current")) for member in held]
            current = int((gpu / "gmem.current").read_text())
            if self.members() != everybody or currents != [int(member.read("gmem.current")) for member in held]:
                return False
            assert current == sum(currents)
            for member in held:
                stat, events = member.flat("gmem.stat"), member.flat("compute.events")
                assert stat["swapout_bytes"] - stat["swapin_bytes"] >= stat["swapped"]
                assert events["frozen"] == 0 or self._frozen_by_path(member), member.path
        return True

    def _frozen_by_path(self, member: Member) -> bool:
        if member.read("compute.freeze") == "1":
            return True
        for place, _, files in os.walk(self.path / "slice"):  # slices may vanish during the walk
            if os.path.basename(place) == str(member.gpu) and "compute.freeze" in files:
                with contextlib.suppress(FileNotFoundError):
                    if Path(place, "compute.freeze").read_text() == "1\n":
                        return True
        return False


@contextlib.contextmanager
def mountpoint() -> Iterator[Path]:
    """Yield an empty directory that every user can reach (pytest's own belong to root alone)."""
    path = Path(tempfile.mkdtemp(prefix="ggroup-"))
    try:
        yield path
    finally:
        path.rmdir()


NEWS = (", and have turns, in ",)
"""Words of lines that tell what happens, and are no error."""


@contextlib.contextmanager
def mounted(path: Path, *options: str, gpu: str = "soft", expect_errors: Sequence[str] = ()) -> Iterator[Mounted]:
    """Mount on `path`; at the end unmount as an operator would (SIGTERM), which must be silent and leave nothing."""
    words = [sys.executable, "-m", "ggroupfs", "mount", "-f", "--gpu", gpu]
    if LEDGER is not None:
        words += ["--ledger", LEDGER]
    # In the virtual machine with the kernel's ledger the daemon may not be scheduled for seconds.
    slow = [f"deadline={5 * SLOW}"] if SLOW > 1 else []
    for option in (*slow, *options):
        words += ["-o", option]
    daemon = subprocess.Popen([*words, os.fspath(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    errors: list[str] = []
    assert daemon.stdout is not None
    assert daemon.stderr is not None
    collector = threading.Thread(target=lambda stream: errors.extend(stream), args=(daemon.stderr,))
    collector.start()
    try:
        line = daemon.stdout.readline()
        if line != "ready\n":
            collector.join(SECONDS * SLOW)
            raise AssertionError(f"not mounted: {line!r}, exit {daemon.wait(SECONDS * SLOW)}: {errors}")
        yield Mounted(path, daemon, errors, expect_errors)
    finally:
        daemon.terminate()
        code = daemon.wait(SECONDS * SLOW)
        collector.join(SECONDS * SLOW)
        daemon.stdout.close()
        daemon.stderr.close()
        stale = mount_of(os.fspath(path))
        if stale is not None:
            subprocess.run(["fusermount3", "-u", "-z", path], check=True)
    assert stale is None, "the mount outlived its daemon"
    if not expect_errors:
        assert code == 0, (code, errors)
    unexpected = [line for line in errors if not any(word in line for word in (*expect_errors, *NEWS))]
    assert not unexpected, unexpected


def alive(pid: int) -> bool:
    """Return whether there is a process with that pid, and it is no zombie."""
    try:
        start_time(pid)
    except ProcessLookupError:
        return False
    return True


def eventually(
    condition: Callable[[], Any], what: str, seconds: float = SECONDS, watch: Stopwatch | None = None
) -> Any:
    """Wait for a condition that only time brings about; the time allowed, on that watch, is part of the test."""
    watch = watch or Stopwatch()
    while True:
        with contextlib.suppress(OSError):
            if result := condition():
                return result
        if watch.seconds > seconds * SLOW:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.005)


class Tenant:
    """A running `ggroupfs tenant`, and its reports."""

    def __init__(self, mount: Mounted, *options: str) -> None:
        words = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(mount.path), *options]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.group = mount.group(self.pid)
        """Directory of its control files."""

    def __enter__(self) -> Tenant:
        self.report()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def report(self) -> dict[str, Any]:
        """Return its next report."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            raise AssertionError(f"tenant ended: {self._process.stderr.read()}")
        report: dict[str, Any] = json.loads(line)
        assert report["corrupt"] == 0, report
        return report

    def kill(self) -> None:
        """Kill it with SIGKILL and reap it."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> dict[str, Any]:
        """Send SIGINT, after which it checks all of its memory, reports once more and ends; return that report."""
        self._process.send_signal(2)
        assert self._process.stdout is not None
        lines = self._process.stdout.readlines()
        code = self._process.wait(SECONDS * SLOW)
        assert self._process.stderr is not None
        assert code == 0, (lines[-1:], self._process.stderr.read())
        last: dict[str, Any] = json.loads(lines[-1])
        assert last["corrupt"] == 0, last
        return last

    def number(self, name: str) -> int:
        """Return the number in one of its control files."""
        return int((self.group / name).read_text())

    def flat(self, name: str) -> dict[str, int]:
        """Return the numbers in one of its flat keyed files."""
        return flat((self.group / name).read_text())

    def write(self, name: str, value: object) -> None:
        """Write a value to one of its control files, as ``echo VALUE > NAME``."""
        (self.group / name).write_text(f"{value}\n")


GOES_ON = r"^(frozen_usec|byte_seconds|since) .*\n"
"""Lines that differ with time, or in the next daemon."""


def contents(directory: Path) -> dict[str, str]:
    """Return the contents of every readable control file, without what changes by itself: times that go on, the start
    of their count, which a daemon that is killed soon does not save, and the record, which makes no promise."""
    readable = [c.name for c in CONTROLS if c.mode & 0o444 and c.name not in ("usermemfd", "gcgroup.record")]
    texts = {name: (directory / name).read_text() for name in readable}
    return {name: re.sub(GOES_ON, "", text, flags=re.M) for name, text in texts.items()}


@contextlib.contextmanager
def reborn(pid: int | None) -> Iterator[int]:
    """Yield a sleeping process with that very pid, or with any."""
    for _ in range(1000):
        if pid is not None:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        child = subprocess.Popen(["sleep", "600"])
        if pid in (None, child.pid):
            break
        child.kill()  # another process took the pid
        child.wait()
    try:
        assert pid in (None, child.pid), "the pid never came back"
        yield child.pid
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def daemons(place: Path, *options: str, gpu: str = "soft", also: Sequence[str] = ()) -> Iterator[Callable[[], Mounted]]:
    """Yield a function that starts the next daemon at the same place. Logs may also contain the words of `also`."""
    with contextlib.ExitStack() as stack:

        def start() -> Mounted:
            mount = stack.enter_context(mounted(place, *options, gpu=gpu, expect_errors=[LEFT_BEHIND, *also]))
            unexpected = [line for line in mount.errors if not any(words in line for words in (LEFT_BEHIND, *also))]
            assert not unexpected, unexpected
            mount.errors.clear()
            return mount

        yield start


def kill(mount: Mounted) -> None:
    mount.daemon.kill()
    mount.daemon.wait()
