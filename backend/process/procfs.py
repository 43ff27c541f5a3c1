"""Parse files of /proc and /sys: bytes in which newline, blank and tab separate, and nothing else does.

Users choose the names in them: of a cgroup, a directory or a program. Python's own ideas of where a line or a word
ends (VT, FF, FS to RS, CR, NEL, U+2028, no-break space; in part for bytes, too) would cut such a name, so that the
rest of it reads like text of the kernel. So this is the only module that takes such text apart; it returns names,
decoded like file names (os.fsdecode), and numbers.
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
"""proc_pid_mountinfo(5) of this process."""
BOOT = f"{PROC}/sys/kernel/random/boot_id"
"""File that identifies this boot."""

Self = Literal["self"]
"""Stands for this process, whose number is different in another pid namespace's /proc."""

_Path = str | os.PathLike[str]

# Files of any kind


def content(path: _Path) -> bytes:
    """Return the content of a file. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def lines(raw: bytes) -> list[bytes]:
    """Return the lines of a file, without their newlines."""
    return raw.removesuffix(b"\n").split(b"\n") if raw else []


def words(line: bytes) -> list[bytes]:
    """Return the words of a line, separated by blanks and tabs."""
    return [word for word in line.replace(b"\t", b" ").split(b" ") if word]


def text(path: _Path) -> str:
    """Return the line of a file of one line, without the newline. Raises OSError."""
    return os.fsdecode(content(path).removesuffix(b"\n"))


def keyed(raw: bytes) -> Mapping[bytes, bytes]:
    """Return the second word of each line by the first, without a colon after that: of a flat keyed file
    (cgroup-v2.rst), of /proc/meminfo and the like.
    """
    found = {}
    for line in lines(raw):
        key, *value = words(line)[:2] or [b""]
        found[key.removesuffix(b":")] = value[0] if value else b""
    return found


_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")


def unescaped(word: bytes) -> str:
    """Return a name that the kernel has escaped: it writes a blank as \\040, and escapes tab, newline and
    backslash, too.
    """
    return os.fsdecode(_OCTAL.sub(lambda match: bytes((int(match[1], 8),)), word))


# Processes


def of_process(pid: int | Self, name: str) -> bytes:
    """Return a file of a process, or with ``task/<tid>/`` before its name, of a thread. Raises ProcessLookupError
    when that is gone, and another OSError where we may not read it, or lack a resource.
    """
    try:
        return content(f"{PROC}/{pid}/{name}")
    except (FileNotFoundError, ProcessLookupError):
        raise fail(errno.ESRCH) from None


@attrs.frozen
class Status:
    """The fields of proc_pid_status(5) that are used here. No process can keep a reader of it waiting."""

    state: bytes
    """State of the thread, one letter."""
    tgid: int
    """Pid of the thread's process."""
    threads: int
    """Number of threads in the process, this one included."""
    has_memory: bool
    """Whether it still has an address space, which a thread gives up first when it ends (exit_mm() in do_exit())."""

    @property
    def is_exiting(self) -> bool:
        """Whether the thread (of a process, the main thread) no longer returns from the kernel."""
        return self.state in (b"Z", b"X") or not self.has_memory

    @property
    def has_ended(self) -> bool:
        """Whether a process still holds its pid but runs nothing."""
        return _has_ended(self.state, self.threads)


def _has_ended(state: bytes, threads: int) -> bool:
    """Return whether a process runs nothing. If threads are left, the main thread has ended and others run."""
    return state in (b"Z", b"X") and threads <= 1


def parse_status(raw: bytes) -> Status:
    """Return those fields of a file. The command, in the first line, has its newlines escaped."""

    def says(key: bytes) -> bytes:
        begin = raw.index(b"\n%s:\t" % key) + len(key) + 3
        return raw[begin : raw.index(b"\n", begin)]

    return Status(says(b"State")[:1], int(says(b"Tgid")), int(says(b"Threads")), b"\nVmSize:\t" in raw)


def status(pid: int, tid: int | None = None) -> Status:
    """Return the status of a process, or of one of its threads. Raises ProcessLookupError when that is gone."""
    return parse_status(of_process(pid, "status" if tid is None else f"task/{tid}/status"))


@attrs.frozen
class Stat:
    """The fields of proc_pid_stat(5) that no other file has, and whether the process has ended, as of
    the same moment.
    """

    state: bytes
    """State of the main thread, one letter."""
    threads: int
    """Number of threads in the process, the main one included."""
    start: int
    """Start time in clock ticks since boot (field 22)."""

    @property
    def has_ended(self) -> bool:
        """As :attr:`Status.has_ended`."""
        return _has_ended(self.state, self.threads)


def parse_stat(raw: bytes) -> Stat:
    """Return those fields of a file. The command, the second field, may hold any bytes; its last
    parenthesis ends it.
    """
    fields = words(raw[raw.rindex(b")") + 1 :].removesuffix(b"\n"))
    return Stat(fields[0], threads=int(fields[17]), start=int(fields[19]))


def stat(pid: int) -> Stat:
    """Return the stat of a process, which can keep its readers waiting: not for an event loop
    (:mod:`backend.process.looks`). Raises ProcessLookupError when it is gone.
    """
    return parse_stat(of_process(pid, "stat"))


def open_stat(pid: int) -> int:
    """Open the stat of a process, which does not wait. Raises ProcessLookupError when it is gone."""
    try:
        return os.open(f"{PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise fail(errno.ESRCH) from None


def read_stat(fd: int) -> Stat:
    """As :func:`stat`, from such a file."""
    return parse_stat(os.pread(fd, 4096, 0))


@attrs.frozen
class Descent:
    """Parent and user of a process, from proc_pid_status(5)."""

    parent: int
    """Pid of the process that started it, or was given it later; 0 for none that is visible here."""
    uid: int
    """Effective user."""


def parse_descent(raw: bytes) -> Descent:
    """Return the parent and the effective user, and parse nothing else: long chains of parents are read at once."""
    parent, user = raw.index(b"\nPPid:\t") + 7, raw.index(b"\nUid:\t") + 6
    return Descent(
        parent=int(raw[parent : raw.index(b"\n", parent)]), uid=int(raw[user : raw.index(b"\n", user)].split(b"\t")[1])
    )


def descent(pid: int) -> Descent:
    """Return the parent and the user of a process. Raises ProcessLookupError when it is gone. Does not wait for it."""
    return parse_descent(of_process(pid, "status"))


def threads(pid: int) -> Sequence[int]:
    """Return the threads of a process, none when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"{PROC}/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def tgid(tid: int) -> int:
    """Return the process of a thread. Raises ProcessLookupError when it is gone."""
    return status(tid).tgid


def command(pid: int) -> str:
    """Return the name of a program, which may hold any bytes. Raises OSError when it is gone."""
    return os.fsdecode(of_process(pid, "comm").removesuffix(b"\n"))


COMMAND_LINE_MOST = 4096
"""Bytes of a command line that are read, at most: a screen shows no more."""


def command_line(pid: int) -> str:
    """Return the words that a program was started with, or has put in their place. They may hold any bytes, and are
    empty for a process without memory. They are read from that memory, which can keep readers waiting. Raises OSError
    when the process is gone.
    """
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
    """A line of proc_pid_cgroup(5): the position of a thread in one hierarchy."""

    hierarchy: int
    """Number of the hierarchy; 0 for cgroup2."""
    controllers: bytes
    """Controllers of a v1 hierarchy, or ``name=`` and its name."""
    path: str
    """Path from the root of our cgroup namespace. The kernel ends the path of a removed cgroup with `` (deleted)``; a
    user may also name a cgroup so.
    """


def parse_cgroups(raw: bytes) -> Sequence[Membership]:
    """Return the lines of a file. The kernel refuses a newline in the name of a cgroup."""
    found = []
    for line in lines(raw):
        hierarchy, controllers, path = line.split(b":", 2)
        found.append(Membership(int(hierarchy), controllers, os.fsdecode(path)))
    return found


def told_cgroups(pid: int | Self, tid: int | None = None) -> bytes:
    """Return the kernel's text on the cgroups of a process, or of one of its threads. Raises ProcessLookupError
    when that is gone.
    """
    return of_process(pid, "cgroup" if tid is None else f"task/{tid}/cgroup")


def cgroups(pid: int | Self) -> Sequence[Membership]:
    """Return the cgroups of a process. Raises ProcessLookupError when it is gone."""
    return parse_cgroups(told_cgroups(pid))


# Mounts


@attrs.frozen
class Mount:
    """A line of proc_pid_mountinfo(5)."""

    device: str
    """Major and minor number, with a colon."""
    root: str
    """Path, in its filesystem, of the directory that is mounted."""
    point: str
    """Path of the mount point."""
    type: str
    """Type of the filesystem, with the subtype after a dot."""
    options: Sequence[str]
    """Options of the filesystem; for a v1 hierarchy they include its controllers."""


def parse_mounts(raw: bytes) -> Sequence[Mount]:
    """Return the mounts of a file. An absent field is an empty word here, between two blanks."""
    found = []
    for line in lines(raw):
        fields = line.split(b" ")
        type_, _, options = fields[fields.index(b"-", 6) + 1 :][:3]
        device, root, point = map(unescaped, fields[2:5])
        found.append(Mount(device, root, point, unescaped(type_), os.fsdecode(options).split(",")))
    return found


def mounts() -> Sequence[Mount]:
    """Return all mounts that this process sees; a mount comes after those that it covers."""
    return parse_mounts(content(MOUNTS))


def cgroup2() -> Mount | None:
    """Return the mount that shows most of the cgroup2 tree (cgroups(7)); None on a machine without one."""
    return _widest(mount for mount in mounts() if mount.type == "cgroup2")


def cgroup1(controller: str) -> Mount | None:
    """Return the mount of a controller's v1 hierarchy; None where it has none."""
    return _widest(mount for mount in mounts() if mount.type == "cgroup" and controller in mount.options)


def _widest(found: Iterable[Mount]) -> Mount | None:
    """Return the mount that shows most: a container may have a part of it mounted, too."""
    return min(found, key=lambda mount: len(mount.root), default=None)


# Cgroups


def levels(tree: Mount, path: str) -> Iterator[str]:
    """Yield the directories of a cgroup and of those above it, lowest first; none if this mount does not
    show the cgroup.
    """
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
"""Seconds until a missing hierarchy is looked for again: most machines never have a v1 hierarchy."""


class Trees:
    """Mounts of cgroup hierarchies, looked for once: there may be thousands of mounts."""

    def __init__(self) -> None:
        self._found: dict[str, Mount] = {}
        self._missed: dict[str, float] = {}  # when, by time.monotonic()

    def of(self, hierarchy: str) -> Mount | None:
        """Return the mount of ``cgroup2``, or of the v1 hierarchy of a controller; None where it is not mounted."""
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
    """Return a file of a cgroup, without the newline; empty where there is none, as in the root, or the
    cgroup is gone.
    """
    with contextlib.suppress(OSError):
        return content(f"{directory}/{name}").removesuffix(b"\n")
    return b""
