"""Records what 0.1 says at the socket: ``python -m tests.versions.record TREE`` with its sources, into v0_1/.

A relay between the library and the daemon, both of that revision, writes down every message: ``>`` is of the program,
``<`` of the daemon, ``+`` behind one says that a descriptor came with it, and ``!`` is what is done at that moment.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import tempfile
import threading
from pathlib import Path

from tests.versions.ends import compile_library, door, library

HERE = Path(__file__).parent
MESSAGE = 64

SCRIPT = (
    "! use 0",
    "! charge 1024",
    "! limits",
    "! report 100 30 64",
    "! write gmem.limit.high 512M",
    "! write gmem.limit.high max",
    "! status",
    "! free 24",
    "! limits",
)
"""What the program, or who administrates, does."""


class Relay:
    """Between one program and the daemon."""

    def __init__(self, path: Path, daemon: Path) -> None:
        self.lines: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(path))
        self._listener.listen()
        self._daemon = daemon
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        program, _ = self._listener.accept()
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        daemon.connect(os.fspath(self._daemon))
        while True:
            for source in select.select([program, daemon], [], [])[0]:
                data, fds, _, _ = socket.recv_fds(source, MESSAGE + 1, 4)
                if not data:
                    return
                self.lines.append(f"{'>' if source is program else '<'} {data.hex()}{' +' * len(fds)}")
                socket.send_fds(daemon if source is program else program, [data], fds)
                for fd in fds:
                    os.close(fd)


def record(tree: Path) -> list[str]:
    """The lines of a session."""
    with tempfile.TemporaryDirectory() as folder:
        binary = compile_library(tree, Path(folder, "library"))
        with door(tree, Path(folder, "daemon")) as daemon:
            relay = Relay(Path(folder, "relay"), Path(folder, "daemon"))
            with library(binary, Path(folder, "relay")) as program:
                for line in SCRIPT:
                    words = line.split()[1:]
                    if words == ["status"]:  # until all is back on the GPU
                        while program.ask("status").split()[1] != "0":
                            pass
                        continue
                    relay.lines.append(line)
                    if words[0] == "write":  # the relay is whom the daemon takes for the program
                        daemon.write(f"{os.getpid()}/0/{words[1]}", words[2])
                    else:
                        program.ask(*words)
            return list(relay.lines)


if __name__ == "__main__":
    (HERE / "v0_1" / "session").write_text("\n".join(record(Path(sys.argv[1]))) + "\n")
