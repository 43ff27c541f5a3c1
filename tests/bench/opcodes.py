"""The number of FUSE requests that a command costs, read from libfuse's own debug log (`-o debug`).

The count is exact and does not depend on the machine. RELEASE comes after close() has returned, so a count is taken
when the log has been quiet for a while.
"""

import re
import subprocess
import time
from collections import Counter
from pathlib import Path

from tests.bench.mounts import Server
from tests.bench.report import BenchError

OPCODE = re.compile(rb"^\s*unique: \d+, opcode: (\w+) ", re.MULTILINE)
QUIET = 0.15
DEADLINE = 10.0


class Trace:
    """The requests that were sent to a server mounted with `-o debug`."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def _settled(self) -> int:
        """Wait until the log stops growing; return its size."""
        size, since, end = -1, 0.0, time.monotonic() + DEADLINE
        while time.monotonic() < end:
            now = self.server.log.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since >= QUIET:
                return size
            time.sleep(QUIET / 10)
        raise BenchError("requests keep coming to an idle mount")

    def of(self, command: str, file: Path) -> Counter[str]:
        """Return the requests that the kernel sent for the shell command, with "$f" for the file."""
        before = self._settled()
        subprocess.run(
            ["/bin/sh", "-c", command],
            env={"f": str(file), "PATH": "/usr/bin:/bin"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = self._settled()
        with self.server.log.open("rb") as log:
            log.seek(before)
            return Counter(opcode.decode() for opcode in OPCODE.findall(log.read(after - before)))


def count(server: Server, pid: int, write: str) -> dict[str, Counter[str]]:
    """Return the requests of a `cat` and an `echo` in the fresh mount `server`, which has the directory of `pid`.

    A first cat and echo of *another* file take the FLUSH and GETXATTR probes that the kernel sends once per mount, as
    well as the lookups of the directories; a stat then looks the measured file up.
    """
    trace = Trace(server)
    other, file = server.file(pid, "gmem.limit.low"), server.file(pid)
    once = trace.of('cat "$f"; echo 0 > "$f"', other)
    trace.of('stat "$f"', file)
    counts = {
        "once per mount (other file)": once,
        "first cat": trace.of('cat "$f"', file),
        "later cat": trace.of('cat "$f"', file),
        "echo": trace.of(f'echo {write} > "$f"', file),
    }
    trace.of('stat "$f"', file)  # the write invalidated the cached attributes; this renews them
    counts["stat again"] = trace.of('stat "$f"; stat "$f"', file)
    return counts
