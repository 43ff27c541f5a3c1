"""Records the messages of 0.1 on the socket, into v0_1/: ``python -m tests.versions.record TREE``, with its sources.

A relay between the library and the daemon, both of that revision, writes down every message: ``>`` marks one of the
program, ``<`` one of the daemon, a ``+`` at its end that a descriptor came with it, and ``!`` an action at that moment.
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
"""The actions of the program, and of an administrator."""


class Relay:
    """Passes messages on between one program and the daemon, and records them."""

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
                    if words == ["status"]:  # wait until all is back on the GPU
                        while program.ask("status").split()[1] != "0":
                            pass
                        continue
                    relay.lines.append(line)
                    if words[0] == "write":  # to the daemon, the relay is the program
                        daemon.write(f"{os.getpid()}/0/{words[1]}", words[2])
                    else:
                        program.ask(*words)
            return list(relay.lines)


if __name__ == "__main__":
    (HERE / "v0_1" / "session").write_text("\n".join(record(Path(sys.argv[1]))) + "\n")
