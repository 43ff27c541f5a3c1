"""The daemon of a run, looked at from outside: what it says, what it holds, and how it ends."""

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
"""What the daemon may have open: more than the tenants of a round have it want. 300 is fewer."""
READY_S = 60.0
EXIT_S = 60.0
"""Until it is gone once it was told to end: it gives everything back first, and levers have a deadline of 5 s."""

EXPECTED = (
    r"process \d+: (not a message|an answer to nothing|an answer that)",
    r"\d+ more lines like the next one were left out",
    r"no room for another program: Too many open files",
    # A user that sets something of a program on its way to another GPU waits for that; its tenant can have it take 5 s.
    # So can two that are asked for memory and do not answer, 3 s each (backend.cuda.managed.RECLAIM_S).
    r"GPU \d+ does not follow for Process\(.*\) \((compute|reclaim)\): \[Errno 110\]",
    # What the driver counts for a program, and what it says that it has besides, may be more than the GPU: told once.
    r"GPU \d+: (Slice|Process)\(.*\) holds \d+, over its gmem\.limit\.high: ",
    r"pid \d+ .*: \[Errno 24\] Too many open files",  # told once, and tried again
    # A program that waits as the daemon ends may have locked what a message to the kernel is about.
    r"a message to the kernel does not come to its end",
    r"process \d+: its library is older than this daemon and lacks",  # so it said
    r"user 65534: more than \d+ connections: dropped",
)
"""What may be said of tenants that break the rules."""


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
        """What it wrote to standard error."""
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
        """How many it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def open_files(self) -> Sequence[str]:
        """What its descriptors are, for a reader of a test that failed."""
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{self.process.pid}/fd"):
                with contextlib.suppress(OSError):
                    found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/{self.process.pid}/fd/{name}")))
        return [f"{found.count(name)} {name}" for name in sorted(set(found))]

    def unexpected(self) -> Sequence[str]:
        """Lines that it must not have written."""
        return [line.rstrip() for line in self.lines if not any(re.search(pattern, line) for pattern in EXPECTED)]

    def state(self) -> str:
        """What its threads are at."""
        found = []
        with contextlib.suppress(OSError):
            for tid in os.listdir(f"/proc/{self.process.pid}/task"):
                where = Path(f"/proc/{self.process.pid}/task/{tid}/wchan").read_text()
                found.append(f"{stat_of(int(tid))[0]} {where}")
        return ", ".join(found)

    def abort(self) -> None:
        """Every request to it ends, now and from now on: what waits for it comes back."""
        with contextlib.suppress(ValueError):  # it was cleaned up meanwhile
            self._connection.abort()

    def tell_to_end(self) -> None:
        """As an operator does."""
        self.process.send_signal(signal.SIGTERM)

    def gone(self) -> int | None:
        """How it ended; None where it does not come to its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(EXIT_S)
        return None

    def clean_up(self) -> None:
        """Whatever has become of it, it is gone, and its mount."""
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
    """Ends what never ends: where something takes too long, the mount is aborted, and it is said what that was."""

    def __init__(self, daemon: Daemon, seconds: float) -> None:
        self._daemon = daemon
        self._seconds = seconds
        self._since: dict[str, float] = {}
        self.found: str | None = None
        """What took too long."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.ages: list[tuple[str, object]] = []
        """Names, and callables that say since when each is at something, in seconds."""

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Something that ends, or is ended."""
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
        """Something of what is under way was done: it takes as long as it takes."""
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
