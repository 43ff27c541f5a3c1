"""Reports the latencies of a server to the policy slo (docs/policies/slo.md)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

SOCKET = "/run/ggroupfs/slo.sock"
"""Default socket of the policy."""
INTERVAL_S = 0.05
"""Shortest time between two datagrams, seconds; latencies in between go with the next one."""
MOST = 128
"""Latencies in one datagram, which has room for 4096 bytes."""
LATER_S = 1.0
"""Seconds after which a missing policy is looked for again."""


class Latencies:
    """Reports latencies from a server's loop. A call is nearly free, except for an occasional send, which never blocks.

    There need not be a policy. What it cannot take, because it is missing or busy, is dropped without an error. Not
    thread-safe: each thread needs an object of its own.
    """

    def __init__(self, group: str | None = None, path: str | os.PathLike[str] = SOCKET) -> None:
        """`group` is a name from the policy's configuration; by default the group of this process is meant."""
        self._address = os.fspath(path)
        self._head = {} if group is None else {"group": group}
        self._latencies: list[float] = []
        self._socket: socket.socket | None = None
        self._next = 0.0

    def report(self, seconds: float) -> None:
        """Report the duration of one request."""
        self._latencies.append(seconds)
        if len(self._latencies) >= MOST or time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Send the collected latencies at once, before a longer time without reports."""
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
        """Close the socket; the next report opens another one."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
