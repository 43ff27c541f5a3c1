"""Notifies systemd of the daemon's state (sd_notify(3)), and feeds the watchdog only while the tree itself answers.

A running daemon need not be a working tree. So each feeding follows a question *through the mount*, like that of any
program, which involves the kernel, the connection and the event loop. It is a single request (statfs) rather than the
three of a read: when hundreds of programs come at once, the event loop takes one in each round, and is busy, not dead.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import trio

from backend.common.threads import in_a_thread

log = logging.getLogger(__name__)


def notify(*assignments: str) -> None:
    """Notify systemd, if that started the daemon: READY=1, STOPPING=1, STATUS=..., WATCHDOG=1. A failure is logged."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        address = "\0" + path[1:] if path.startswith("@") else path
        try:
            _sender().sendto("\n".join(assignments).encode(errors="backslashreplace"), address)
        except OSError as error:
            log.warning("systemd cannot be told %s: %s", assignments[0], error.strerror)


@functools.cache
def _sender() -> socket.socket:
    """Open from READY=1 on: a daemon short of descriptors still serves its tree, and must not be killed for that."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def period(environment: Mapping[str, str]) -> float | None:
    """Seconds after which systemd considers the daemon dead; None if it does not watch (sd_watchdog_enabled(3))."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # meant for the process that started this one
    try:
        microseconds = int(environment.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 else None


async def feed(path: Path, seconds: float) -> None:
    """Query the filesystem of a file in the tree every half of `seconds`, and feed the watchdog on a timely answer.

    Runs until cancelled.
    """
    beat = seconds / 2
    while True:
        began = trio.current_time()
        try:
            with trio.fail_after(beat):
                # A question that hangs is abandoned. There are few of these: systemd soon kills the daemon.
                await in_a_thread(f"{path}", functools.partial(os.statvfs, path))
        except (OSError, trio.TooSlowError) as error:
            why = str(error) if isinstance(error, OSError) else f"no answer within {beat:g} s"
            log.warning("%s: %s: the watchdog is not fed", path, why)
            notify(f"STATUS={path} does not answer")
        else:
            notify("WATCHDOG=1")
        await trio.sleep_until(began + beat)
