"""How a server tells the policy slo what its latency is (docs/policies/slo.md)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

SOCKET = "/run/ggroupfs/slo.sock"
"""Where the policy receives, unless its configuration says otherwise."""
INTERVAL_S = 0.05
"""A datagram no more often than this: what comes between goes with the next one."""
MOST = 128
"""Latencies in one datagram, which has room for 4096 bytes."""
LATER_S = 1.0
"""After so long a policy that is not there is looked for again."""


class Latencies:
    """Reports latencies, from a server's loop: a call costs next to nothing, but for a send now and then, which never
    waits.

    There need not be a policy. What it does not take, because it is not there or has too much to do, is lost: nothing
    is kept for later, and nothing is raised. Not for several threads at once; each has its own.
    """

    def __init__(self, group: str | None = None, path: str | os.PathLike[str] = SOCKET) -> None:
        """`group` as the policy's configuration names it; without one it is that which this process is in."""
        self._address = os.fspath(path)
        self._head = {} if group is None else {"group": group}
        self._latencies: list[float] = []
        self._socket: socket.socket | None = None
        self._next = 0.0

    def report(self, seconds: float) -> None:
        """A request took so long."""
        self._latencies.append(seconds)
        if len(self._latencies) >= MOST or time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Sends what there is, at once; for who will not report for a while."""
        latencies, self._latencies = self._latencies, []
        now = time.monotonic()
        if not latencies or (self._socket is None and now < self._next):
            return
        self._next = now + INTERVAL_S
        words = {**self._head, "latency_ms": [round(1e3 * one, 4) for one in latencies]}
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
                self._socket.connect(self._address)
            self._socket.send(json.dumps(words, separators=(",", ":")).encode())
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            self._next = now + LATER_S

    def close(self) -> None:
        """Closes the socket; the next report opens another one."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
