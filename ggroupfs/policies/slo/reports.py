"""The reports of latencies from programs: datagrams, whose sender is identified by the kernel (unix(7)).

A datagram is a JSON object, ``{"latency_ms": 12.3}``: a number or a list of numbers, in milliseconds. ``group`` names
one of the configured groups, for a proxy that serves several; by default it is the group of the sender. A process of
root, or of the user of the policy, may report for any group, and any other process for the groups that it is in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from backend.process.identity import Slice, cgroup_of
from ggroupfs.policies.slo.samples import Interval

log = logging.getLogger(__name__)

BYTES = 4096
"""Largest datagram that is accepted, bytes."""
LONGEST_MS = 86_400_000.0
"""Largest latency that is accepted, milliseconds: a day. A longer one is a mistake."""
AT_ONCE = 256
"""Datagrams read before other tasks have their turn."""
BREATH_S = 0.01
"""Seconds after such a batch before the next one, so that no sender can keep the policy busy."""
TOLD_S = 60.0
"""Seconds between two log lines about dropped reports."""

CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""


@attrs.frozen
class Report:
    """One datagram."""

    latencies: Sequence[float]
    """Latencies, seconds."""
    group: str | None
    """Group that the report is for; None for the sender's own group."""


@attrs.frozen
class Place:
    """The processes of a group, against which a sender is checked."""

    pid: int | None
    """Pid, for a group that is one process."""
    cgroup: Slice | None
    """Cgroup, for a group that is a slice."""

    def holds(self, pid: int) -> bool:
        """Whether a process is in the group; False if the process is gone."""
        if self.cgroup is None:
            return pid == self.pid
        try:
            return self.cgroup.contains(cgroup_of(pid))
        except OSError:
            return False


def parse(raw: bytes) -> Report:
    """Parse a datagram. ValueError, with the reason, if it is not a report."""
    if len(raw) > BYTES:
        raise ValueError(f"longer than {BYTES} bytes")
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if not isinstance(said, dict) or not said.keys() <= {"group", "latency_ms"}:
        raise ValueError("no object with latency_ms, and group if need be")
    group, found = said.get("group"), said.get("latency_ms")
    if group is not None and not isinstance(group, str):
        raise ValueError("group is no string")
    return Report([_seconds(one) for one in (found if isinstance(found, list) else [found])], group)


def _seconds(ms: object) -> float:
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 <= ms <= LONGEST_MS:  # false for NaN, too
        raise ValueError("latency_ms is no number of milliseconds, nor a list of them")
    return ms / 1e3


class Desk:
    """The receiver of the reports for some groups."""

    def __init__(self, groups: Mapping[str, tuple[Place, Interval]], user: int | None = None) -> None:
        """Processes of `user`, by default the user of this process, may report for all groups, as those of root may."""
        self._groups = groups
        self._user = os.geteuid() if user is None else user

    def take(self, raw: bytes, pid: int, uid: int) -> None:
        """Take one datagram from a process of a user. ValueError, with the reason, if it is dropped."""
        report = parse(raw)
        trusted = uid in (0, self._user)
        if report.group is None:
            names = [name for name, (place, _) in self._groups.items() if place.holds(pid)]
            if not names:
                raise ValueError(f"pid {pid} is in no group")
        elif report.group not in self._groups:
            raise ValueError("there is no such group")
        elif not trusted and not self._groups[report.group][0].holds(pid):
            raise ValueError(f"pid {pid} of user {uid} is not in that group")
        else:
            names = [report.group]
        for name in names:
            self._groups[name][1].add(report.latencies)


@contextlib.contextmanager
def receiving(path: Path) -> Iterator[trio.socket.SocketType]:
    """Bind a socket at `path` to which any user may send, and remove it at the end.

    EADDRINUSE if another process receives there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
        except ConnectionRefusedError:
            path.unlink()  # left behind by a killed policy
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), os.fspath(path))
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.closing(trio.socket.from_stdlib_socket(receiver)) as ours:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        receiver.bind(os.fspath(path))
        try:
            path.chmod(0o666)
            yield ours
        finally:
            path.unlink(missing_ok=True)


async def receive(ours: trio.socket.SocketType, take: Callable[[bytes, int, int], None]) -> None:
    """Pass each datagram to `take`, with the sender's pid and uid, until cancelled.

    A ValueError of `take` is logged.
    """
    dropped, told = 0, -TOLD_S
    while True:
        for _ in range(AT_ONCE):
            raw, ancillary, _, _ = await ours.recvmsg(BYTES + 1, socket.CMSG_SPACE(CREDENTIALS.size))
            try:
                take(raw, *_sender(ancillary))
            except ValueError as error:
                dropped += 1
                if trio.current_time() - told >= TOLD_S:
                    log.warning("dropped %d reports, the last one: %s", dropped, error)
                    dropped, told = 0, trio.current_time()
        await trio.sleep(BREATH_S)


def _sender(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, int]:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= CREDENTIALS.size:
            pid, uid, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
            return pid, uid
    raise ValueError("its sender is not known")
