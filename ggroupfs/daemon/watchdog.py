"""What systemd is told of the daemon (sd_notify(3)), and its watchdog, fed only while the tree itself answers.

A daemon that runs is not yet a tree that works: so it is fed after a question *through the mount*, as any program asks,
which takes the kernel, the connection to it and the event loop. It is one request (statfs), and not the three of a
read: where hundreds of programs come at once the event loop takes one in each of its rounds, and is busy, not dead.
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
    """Tells systemd, where it started us: READY=1, STOPPING=1, STATUS=..., WATCHDOG=1. What cannot be is logged."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        address = "\0" + path[1:] if path.startswith("@") else path
        try:
            _sender().sendto("\n".join(assignments).encode(errors="backslashreplace"), address)
        except OSError as error:
            log.warning("systemd cannot be told %s: %s", assignments[0], error.strerror)


@functools.cache
def _sender() -> socket.socket:
    """Open from READY=1 on: a daemon that is short of descriptors serves its tree, and is not to be killed for that."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def period(environment: Mapping[str, str]) -> float | None:
    """Seconds after which systemd takes us for dead; None if it does not look (sd_watchdog_enabled(3))."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # meant for who started us
    try:
        microseconds = int(environment.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 else None


async def feed(path: Path, seconds: float) -> None:
    """Asks for the file system of a file in the tree every half of `seconds`, and feeds the watchdog if that was
    answered in as long. Until cancelled."""
    beat = seconds / 2
    while True:
        began = trio.current_time()
        try:
            with trio.fail_after(beat):
                # A question that hangs is left behind. Not many: soon nobody is there to ask any more.
                await in_a_thread(f"{path}", functools.partial(os.statvfs, path))
        except (OSError, trio.TooSlowError) as error:
            why = str(error) if isinstance(error, OSError) else f"no answer within {beat:g} s"
            log.warning("%s: %s: the watchdog is not fed", path, why)
            notify(f"STATUS={path} does not answer")
        else:
            notify("WATCHDOG=1")
        await trio.sleep_until(began + beat)
