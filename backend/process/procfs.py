"""What the kernel says in /proc and /sys: bytes, in which newline, blank and tab separate, and nothing else does.

Users choose the names in it: a user calls a cgroup, a directory or a program as they please. Python's own ideas of
where a line or a word ends (VT, FF, FS to RS, CR, NEL, U+2028, no-break space; in part for bytes too) would cut such a
name, so that the rest of it reads as something that the kernel said. So this is the only place that takes such text
apart, and what comes out of it is names, as file names are (os.fsdecode), and numbers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import attrs

from backend.common.errors import fail

PROC = "/proc"
MOUNTS = f"{PROC}/self/mountinfo"
"""proc_pid_mountinfo(5), of this process."""
BOOT = f"{PROC}/sys/kernel/random/boot_id"
"""Tells this boot from others."""

Self = Literal["self"]
"""In place of a pid: this process has another number in another pid namespace's /proc."""

_Path = str | os.PathLike[str]

# Any of it


def content(path: _Path) -> bytes:
    """A file, whole. OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def lines(raw: bytes) -> list[bytes]:
    """Its lines, without their newlines."""
    return raw.removesuffix(b"\n").split(b"\n") if raw else []


def words(line: bytes) -> list[bytes]:
    """What blanks and tabs separate."""
    return [word for word in line.replace(b"\t", b" ").split(b" ") if word]


def text(path: _Path) -> str:
    """A file of one line, without the newline. OSError."""
    return os.fsdecode(content(path).removesuffix(b"\n"))


def keyed(raw: bytes) -> Mapping[bytes, bytes]:
    """Of a flat keyed file (cgroup-v2.rst), and of /proc/meminfo and the like, what follows the first word of a line;
    the colon after that is none of it."""
    found = {}
    for line in lines(raw):
        key, *value = words(line)[:2] or [b""]
        found[key.removesuffix(b":")] = value[0] if value else b""
    return found


_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")


def unescaped(word: bytes) -> str:
    """A name that the kernel has mangled: a blank is \\040 there, and tab, newline and backslash are so, too."""
    return os.fsdecode(_OCTAL.sub(lambda match: bytes((int(match[1], 8),)), word))


# Processes


def of_process(pid: int | Self, name: str) -> bytes:
    """A file of a process, or with ``task/<tid>/`` before its name of a thread. ProcessLookupError when it is gone,
    another OSError where we may not, or are short of something."""
    try:
        return content(f"{PROC}/{pid}/{name}")
    except (FileNotFoundError, ProcessLookupError):
        raise fail(errno.ESRCH) from None


@attrs.frozen
class Status:
    """What is asked of proc_pid_status(5) here. No process can have its readers wait."""

    state: bytes
    """One letter."""
    tgid: int
    """The process of a thread."""
    threads: int
    """How many there are, this one too."""
    has_memory: bool
    """Whether it has an address space still: the first that a thread lets go of at its end (exit_mm() in do_exit())."""

    @property
    def is_exiting(self) -> bool:
        """Whether that thread, of a process the main one, comes back from the kernel no more."""
        return self.state in (b"Z", b"X") or not self.has_memory

    @property
    def has_ended(self) -> bool:
        """Whether a process holds its pid and runs nothing."""
        return _has_ended(self.state, self.threads)


def _has_ended(state: bytes, threads: int) -> bool:
    """Whether that is of a process that runs nothing. With threads left, the main thread has ended and others run."""
    return state in (b"Z", b"X") and threads <= 1


def parse_status(raw: bytes) -> Status:
    """Takes it apart, as far as that. The command, in the first line, has its newlines escaped."""

    def says(key: bytes) -> bytes:
        begin = raw.index(b"\n%s:\t" % key) + len(key) + 3
        return raw[begin : raw.index(b"\n", begin)]

    return Status(says(b"State")[:1], int(says(b"Tgid")), int(says(b"Threads")), b"\nVmSize:\t" in raw)


def status(pid: int, tid: int | None = None) -> Status:
    """Of a process, or one of its threads. ProcessLookupError when it is gone."""
    return parse_status(of_process(pid, "status" if tid is None else f"task/{tid}/status"))


@attrs.frozen
class Stat:
    """Of proc_pid_stat(5), what is said nowhere else; and whether the process has ended, as of the same moment."""

    state: bytes
    """One letter."""
    threads: int
    """How many there are, this one too."""
    start: int
    """Clock ticks since boot (field 22)."""

    @property
    def has_ended(self) -> bool:
        """As :attr:`Status.has_ended`."""
        return _has_ended(self.state, self.threads)


def parse_stat(raw: bytes) -> Stat:
    """Takes it apart. The command, the second field, may hold anything: what counts is its last parenthesis."""
    fields = words(raw[raw.rindex(b")") + 1 :].removesuffix(b"\n"))
    return Stat(fields[0], threads=int(fields[17]), start=int(fields[19]))


def stat(pid: int) -> Stat:
    """Of a process, which can have its readers wait: not in an event loop (:mod:`backend.process.looks`).
    ProcessLookupError when it is gone."""
    return parse_stat(of_process(pid, "stat"))


def open_stat(pid: int) -> int:
    """Its file, opened: that does not wait. ProcessLookupError when it is gone."""
    try:
        return os.open(f"{PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise fail(errno.ESRCH) from None


def read_stat(fd: int) -> Stat:
    """As :func:`stat`, of such a file."""
    return parse_stat(os.pread(fd, 4096, 0))


@attrs.frozen
class Descent:
    """Of proc_pid_status(5), whose child a process is."""

    parent: int
    """Process that started it, or the one that it was left to; 0 for none that is to be seen from here."""
    uid: int
    """Effective user."""


def parse_descent(raw: bytes) -> Descent:
    """The parent and the effective user, and nothing else of it: a long chain of parents is read at once."""
    parent, user = raw.index(b"\nPPid:\t") + 7, raw.index(b"\nUid:\t") + 6
    return Descent(
        parent=int(raw[parent : raw.index(b"\n", parent)]), uid=int(raw[user : raw.index(b"\n", user)].split(b"\t")[1])
    )


def descent(pid: int) -> Descent:
    """The parent and the user of a process. ProcessLookupError when it is gone. Waits for no process."""
    return parse_descent(of_process(pid, "status"))


def threads(pid: int) -> Sequence[int]:
    """The threads of a process, none when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"{PROC}/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def tgid(tid: int) -> int:
    """The process of a thread. ProcessLookupError when it is gone."""
    return status(tid).tgid


def command(pid: int) -> str:
    """The name of a program, which may hold any bytes. OSError when it is gone."""
    return os.fsdecode(of_process(pid, "comm").removesuffix(b"\n"))


COMMAND_LINE_MOST = 4096
"""Bytes of a command line that are read, at most: a screen shows no more."""


def command_line(pid: int) -> str:
    """The words that a program was started with, or has put in their place: it may hold any bytes, and is empty for one
    without memory. It is read from that memory, which can have its readers wait. OSError when it is gone."""
    try:
        file = os.open(f"{PROC}/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise fail(errno.ESRCH) from None
    try:
        return os.fsdecode(os.read(file, COMMAND_LINE_MOST).rstrip(b"\0").replace(b"\0", b" "))
    finally:
        os.close(file)


@attrs.frozen
class Membership:
    """A line of proc_pid_cgroup(5): where a thread is in one hierarchy."""

    hierarchy: int
    """0 for cgroup2."""
    controllers: bytes
    """Of a v1 hierarchy, or ``name=`` and what it is called."""
    path: str
    """From the root of our cgroup namespace. The kernel ends that of a cgroup that was removed with `` (deleted)``, and
    so may the user that makes one."""


def parse_cgroups(raw: bytes) -> Sequence[Membership]:
    """Takes it apart. The kernel refuses a newline in the name of a cgroup."""
    found = []
    for line in lines(raw):
        hierarchy, controllers, path = line.split(b":", 2)
        found.append(Membership(int(hierarchy), controllers, os.fsdecode(path)))
    return found


def told_cgroups(pid: int | Self, tid: int | None = None) -> bytes:
    """Of a process, or one of its threads, as the kernel tells it. ProcessLookupError when it is gone."""
    return of_process(pid, "cgroup" if tid is None else f"task/{tid}/cgroup")


def cgroups(pid: int | Self) -> Sequence[Membership]:
    """Of a process. ProcessLookupError when it is gone."""
    return parse_cgroups(told_cgroups(pid))


# Mounts


@attrs.frozen
class Mount:
    """A line of proc_pid_mountinfo(5)."""

    device: str
    """Major and minor number, with a colon."""
    root: str
    """What of its filesystem is there."""
    point: str
    """Where."""
    type: str
    """Of the filesystem, with the subtype after a dot."""
    options: Sequence[str]
    """Of the filesystem: of a v1 hierarchy its controllers, too."""


def parse_mounts(raw: bytes) -> Sequence[Mount]:
    """Takes it apart. What there is none of is an empty word here, between two blanks."""
    found = []
    for line in lines(raw):
        fields = line.split(b" ")
        type_, _, options = fields[fields.index(b"-", 6) + 1 :][:3]
        device, root, point = map(unescaped, fields[2:5])
        found.append(Mount(device, root, point, unescaped(type_), os.fsdecode(options).split(",")))
    return found


def mounts() -> Sequence[Mount]:
    """All that this process sees; what is over another comes after it."""
    return parse_mounts(content(MOUNTS))


def cgroup2() -> Mount | None:
    """Most of the cgroup2 tree (cgroups(7)) that is mounted; None on a machine without one."""
    return _widest(mount for mount in mounts() if mount.type == "cgroup2")


def cgroup1(controller: str) -> Mount | None:
    """The v1 hierarchy of a controller; None where it has none."""
    return _widest(mount for mount in mounts() if mount.type == "cgroup" and controller in mount.options)


def _widest(found: Iterable[Mount]) -> Mount | None:
    """That which shows most: a container may have a part of it mounted, too."""
    return min(found, key=lambda mount: len(mount.root), default=None)


# Cgroups


def levels(tree: Mount, path: str) -> Iterator[str]:
    """The directories of a cgroup and of those above it, lowest first; none for one that this mount does not show."""
    root = tree.root.rstrip("/")
    if path != root and not path.startswith(f"{root}/"):
        return
    below = path[len(root) :].rstrip("/")
    while True:
        yield tree.point + below
        if not below:
            return
        below = below.rpartition("/")[0]


MISSED_S = 10.0
"""Seconds until a hierarchy is looked for again that was not there: most machines have no v1 hierarchy, ever."""


class Trees:
    """Where cgroups are, looked for once: there may be thousands of mounts."""

    def __init__(self) -> None:
        self._found: dict[str, Mount] = {}
        self._missed: dict[str, float] = {}  # when, by time.monotonic()

    def of(self, hierarchy: str) -> Mount | None:
        """``cgroup2``, or the controller of a v1 hierarchy. None where it is not mounted."""
        if hierarchy not in self._found:
            now = time.monotonic()
            if now - self._missed.get(hierarchy, -MISSED_S) < MISSED_S:
                return None
            mount = cgroup2() if hierarchy == "cgroup2" else cgroup1(hierarchy)
            if mount is None:
                self._missed[hierarchy] = now
                return None
            self._found[hierarchy] = mount
        return self._found[hierarchy]


trees = Trees()


def says(directory: str, name: str) -> bytes:
    """A file of a cgroup, without the newline; empty where there is none, as in the root, or the cgroup is gone."""
    with contextlib.suppress(OSError):
        return content(f"{directory}/{name}").removesuffix(b"\n")
    return b""
