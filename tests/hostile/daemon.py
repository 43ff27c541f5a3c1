"""The daemon of a run, looked at from outside: its log, its files, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ggroupfs.fs.connection import Connection
from ggroupfs.mounts import mount_of
from tests.hostile.page import Page
from tests.support.proc import stat_of

DESCRIPTORS = 4096
"""Descriptors that the daemon may have: more than the tenants of a round make it want, which is over 300."""
READY_S = 60.0
EXIT_S = 60.0
"""Seconds from the order to end until it is gone: it thaws everything first, and levers have a deadline of 5 s."""

EXPECTED = (
    r"process \d+: (not a message|an answer to nothing|an answer that)",
    r"\d+ more lines like the next one were left out",
    r"no room for another program: Too many open files",
    # A user's setting for a program that is being moved waits for the move, which the tenant can drag out for 5 s. So
    # do two programs that are asked for memory and do not answer, 3 s each (backend.cuda.managed.RECLAIM_S).
    r"GPU \d+ does not follow for Process\(.*\) \((compute|reclaim)\): \[Errno 110\]",
    # The driver's figure for a program, plus what it claims besides, may exceed the GPU: logged once.
    r"GPU \d+: (Slice|Process)\(.*\) holds \d+, over its gmem\.limit\.high: ",
    r"pid \d+ .*: \[Errno 24\] Too many open files",  # logged once, and retried
    # A program that waits as the daemon ends may hold the lock that a message to the kernel needs.
    r"a message to the kernel does not come to its end",
    r"process \d+: its library is older than this daemon and lacks",  # as it claimed
    r"user 65534: more than \d+ connections: dropped",
    r"programs use more memory than there is room for, and have turns, in \d+ sets",
)
"""Log lines that tenants which break the rules may cause."""


class Daemon:
    """A mount, and the process that serves it."""

    def __init__(self, mount: Path, protocol: str, page: Page) -> None:
        self.mount = mount
        module = ["ggroupfs"] if protocol == "soft" else ["tests.hostile.driver", str(page.descriptor)]
        gpu = ["--gpu", "soft", "-o", "soft.gpus=2,soft.gmem=2G"] if protocol == "soft" else ["--gpu", "nvidia"]
        words = [sys.executable, "-m", *module, "mount", "-f", *gpu, "--ledger", "soft"]
        self.process = subprocess.Popen(
            [*words, os.fspath(mount)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[page.descriptor] if protocol != "soft" else [],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )
        self.lines: list[str] = []
        """Lines that it wrote to standard error."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._collector = threading.Thread(target=self.lines.extend, args=(self.process.stderr,))
        self._collector.start()
        line = self.process.stdout.readline()
        if line != "ready\n":
            self.process.kill()
            self._collector.join()
            raise AssertionError(f"the daemon did not begin: {line!r} {self.lines}")
        self._connection = Connection(os.stat(mount).st_dev)
        facts = (mount / "ggroup.backend").read_text().splitlines()
        self.door = dict(line.split(" ", 1) for line in facts)["socket"]

    def descriptors(self) -> int:
        """Return the number of its open descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def open_files(self) -> Sequence[str]:
        """Return the targets of its descriptors, for the report of a failed test."""
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{self.process.pid}/fd"):
                with contextlib.suppress(OSError):
                    found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/{self.process.pid}/fd/{name}")))
        return [f"{found.count(name)} {name}" for name in sorted(set(found))]

    def unexpected(self) -> Sequence[str]:
        """Return lines that it must not have written."""
        return [line.rstrip() for line in self.lines if not any(re.search(pattern, line) for pattern in EXPECTED)]

    def state(self) -> str:
        """Return what its threads are doing."""
        found = []
        with contextlib.suppress(OSError):
            for tid in os.listdir(f"/proc/{self.process.pid}/task"):
                where = Path(f"/proc/{self.process.pid}/task/{tid}/wchan").read_text()
                found.append(f"{stat_of(int(tid))[0]} {where}")
        return ", ".join(found)

    def abort(self) -> None:
        """Abort the mount: every request to it ends, now and later, and what waits for it comes back."""
        with contextlib.suppress(ValueError):  # it may have been cleaned up meanwhile
            self._connection.abort()

    def tell_to_end(self) -> None:
        """Tell it to end as an operator does."""
        self.process.send_signal(signal.SIGTERM)

    def gone(self) -> int | None:
        """Return its exit status; None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(EXIT_S)
        return None

    def clean_up(self) -> None:
        """Remove it and its mount, whatever has become of it."""
        if self.process.poll() is None:
            self.abort()
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_S)
        self._connection.close()
        self._collector.join(EXIT_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        if mount_of(os.fspath(self.mount)) is not None:
            subprocess.run(["fusermount3", "-u", "-z", os.fspath(self.mount)], check=False)


class Watch:
    """Ends what never ends: where a step takes too long, the mount is aborted, and the step is reported."""

    def __init__(self, daemon: Daemon, seconds: float) -> None:
        self._daemon = daemon
        self._seconds = seconds
        self._since: dict[str, float] = {}
        self.found: str | None = None
        """The step that took too long."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.ages: list[tuple[str, object]] = []
        """Names, and functions that return the seconds since each began its present call."""

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Enclose a step that must end, or is ended."""
        self._since[what] = time.monotonic()
        try:
            yield
        except OSError:
            if self.found is not None:
                raise AssertionError(self.found) from None
            raise
        finally:
            del self._since[what]
        assert self.found is None, self.found

    def goes_on(self) -> None:
        """Note progress of the present step, which may then take longer."""
        for what in self._since:
            self._since[what] = time.monotonic()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.5):
            ages = [(what, time.monotonic() - since) for what, since in list(self._since.items())]
            ages += [(what, age()) for what, age in list(self.ages)]  # type: ignore[operator]
            late = [f"{what} for {age:.0f} s" for what, age in ages if age > self._seconds]
            if late and self.found is None:
                self.found = f"hangs: {', '.join(late)}; the daemon's threads: {self._daemon.state()}"
                self._daemon.abort()
