"""The doctor's checks of the host: its cgroups, MPS, and the versions of the parts that work together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from backend.cuda.about import about
from backend.door.wire import names
from backend.ledgers import kernel
from backend.process import fanotify, procfs
from backend.process.dmem import CAPACITY, DRIVER, LIMIT, Files, Walls
from backend.process.identity import Process, cgroup_of, owner_of
from backend.process.looks import look_here
from backend.space import control
from backend.space.space import SUFFIX, Record, read_records
from ggroupfs import VERSION
from ggroupfs.commands.finding import Finding
from ggroupfs.text.names import is_number
from ggroupfs.view.columns import readable

MPS_COMMAND = "nvidia-cuda-mps-control"[:15]
"""Name of MPS's control daemon and server, as far as the kernel keeps it (TASK_COMM_LEN, linux/sched.h)."""
SPACES = Path("/run/ggroupfs")
"""Directory in which daemons have the directories of their spaces, beside their sockets."""
DRIVERS = ("580", "595")
"""Branches of the NVIDIA driver whose ioctls were studied (docs/nvidia.md)."""
MODULES = Path("/sys/module")
"""Directory in which the kernel lists the loaded modules, with their versions."""


def cgroups(mounts: Sequence[procfs.Mount] | None = None) -> Finding:
    """Report the hierarchy that slices follow: cgroup2, and on a hybrid host systemd's own next to it."""
    found = procfs.mounts() if mounts is None else mounts
    unified = next((mount.point for mount in found if mount.type == "cgroup2"), None)
    others = [mount for mount in found if mount.type == "cgroup"]
    systemd = next((mount.point for mount in others if "name=systemd" in mount.options), None)
    if unified is None:
        if systemd is None:
            return Finding("cgroups", "advisory", "no cgroup2: slices stay empty")
        why = f"no cgroup2: slices follow systemd's own v1 hierarchy at {systemd}"
        return Finding("cgroups", "advisory", why)
    if systemd is not None:
        why = (
            f"hybrid: slices follow cgroup2 at {unified} and, for a process in its root, systemd's own v1 hierarchy at"
            f" {systemd}. With systemd.unified_cgroup_hierarchy=1 on the kernel's command line there is cgroup2 alone"
        )
        return Finding("cgroups", "advisory", why)
    own = readable(cgroup_of(os.getpid()).path)
    more = f"; v1 hierarchies beside it are not followed: {len(others)}" if others else ""
    return Finding("cgroups", "ok", f"slices follow /proc/<pid>/cgroup; this process is in {own}{more}")


def openings() -> Finding:
    """Report whether the kernel can make a program wait when it opens a file, which ``-o usher=`` needs."""
    try:
        fanotify.check()
    except OSError as error:
        return Finding("usher", "unsupported", f"no opening of a file can be had wait: {error.strerror}")
    return Finding("usher", "ok", "with -o usher=cuda programs that start in a frozen slice wait before they use a GPU")


def dmem(walls: Walls | None = None) -> Finding:
    """Report whether the kernel keeps hard limits of slices, too."""
    try:
        regions = [name for name in (walls or Files()).regions() if name.split("/", 1)[0] == DRIVER]
    except OSError as error:
        return Finding("dmem", "advisory", f"{CAPACITY}: {error.strerror}: hard limits are kept by ggroupfs alone")
    if not regions:
        why = (
            "NVIDIA's driver has registered no memory with the kernel (driver 615 and later does, on Linux with"
            " CONFIG_CGROUP_DMEM): hard limits are kept by ggroupfs alone"
        )
        return Finding("dmem", "ok", why)
    named = ", ".join(map(readable, regions))
    return Finding("dmem", "ok", f"{named}: gmem.limit.max of a slice is {LIMIT} of its cgroup, too, where it has that")


def mps(folder: Path = SPACES) -> Finding:
    """Report whether MPS runs that is not ours, and the consequences. The user is named too, since any program can use
    that name.
    """
    ours = {record.control.pid for record in _records(folder) if record.control is not None and _runs(record.control)}
    others = [pid for pid in sorted(_named(MPS_COMMAND)) if pid not in ours and _parent(pid) not in ours]
    running = [f"{pid} of user {owner_of(pid)}" for pid in others]
    if not running:
        return Finding("MPS", "ok", "neither its control daemon nor a server runs in this pid namespace but for spaces")
    why = (
        f"runs as process {', '.join(running)}: its clients share the TSGs of the server and cannot be told apart."
        " Freeze and timeslice of a client are refused, and what is set on the server acts on all its clients"
    )
    return Finding("MPS", "advisory", why)


def servers(folder: Path = SPACES) -> Iterator[Finding]:
    """Report the control daemon of each space, and its servers; and whether there could be any."""
    program = control.find()
    why = f"{program}: compute.spatial has the programs of a slice share it" if program else control.MISSING
    yield Finding("spaces", "ok" if program else "unsupported", why)
    for record in _records(folder):
        subject = f"space {record.space.name}"
        whose = f"user {record.space.uid} in {readable(record.space.slice.path)}"
        if record.control is None or not _runs(record.control):
            yield Finding(subject, "advisory", f"{whose}: its control daemon does not run")
            continue
        pids = [pid for pid in _named(MPS_COMMAND) if _parent(pid) == record.control.pid]
        words = f"servers {', '.join(map(str, sorted(pids)))}" if pids else "no server, as no program came yet"
        yield Finding(subject, "ok", f"{whose}: control daemon {record.control.pid}, {words}")


def _records(folder: Path) -> list[Record]:
    return [record for directory in sorted(folder.glob(f"*{SUFFIX}")) for record in read_records(directory)]


def _runs(process: Process) -> bool:
    with contextlib.suppress(OSError):
        return look_here(process.pid, partial(procfs.stat, process.pid)).start == process.start
    return False


def _parent(pid: int) -> int:
    try:
        return procfs.descent(pid).parent
    except OSError:
        return 0


def _named(command: str) -> Iterator[int]:
    for name in os.listdir(procfs.PROC):
        if is_number(name):
            with contextlib.suppress(OSError):  # it has ended
                if procfs.command(int(name)) == command:
                    yield int(name)


def versions() -> Iterator[Finding]:
    """Report the versions of the command, the library, the kernel module and the driver, and whether they match."""
    yield Finding("ggroupfs", "ok", f"version {VERSION}")
    yield _library()
    yield _module(VERSION)
    driver = _loaded("nvidia")
    if driver is None:
        yield Finding("NVIDIA driver", "unsupported", "not loaded")
    elif driver.partition(".")[0] in DRIVERS:
        yield Finding("NVIDIA driver", "ok", f"version {driver}")
    else:
        why = f"version {driver}: {' and '.join(DRIVERS)} are known; the proofs below say what works with this one"
        yield Finding("NVIDIA driver", "advisory", why)


def _library() -> Finding:
    from ggroupfs.commands.run import library

    try:
        path = library()
    except RuntimeError as error:
        return Finding("library", "advisory", f"{str(error).removeprefix('run: ')}: limits of memory need it")
    try:
        found = about(path)
    except OSError as error:
        return Finding("library", "advisory", f"{path}: {error.strerror}: make it anew, or install it")
    words = f"{path}: protocol {found.version}, features {names(found.features)}"
    misfit = found.misfit
    return Finding("library", "advisory" if misfit else "ok", f"{words}; it {misfit}" if misfit else words)


def _module(own: str) -> Finding:
    """Report the kernel module. Its capabilities come from the module itself, and do not follow from its version."""
    try:
        lacks = kernel.lacking(kernel.features())
        words = f"the kernel module ggroup keeps the books: {kernel.check()}"
    except OSError as error:
        why = f"{error.strerror}; the daemon keeps the books, and a journal of them"
        return Finding(kernel.DEVICE, "advisory", why)
    loaded = _loaded("ggroup")
    if loaded not in (None, own):
        words += f"; it is of ggroupfs {loaded}: load it anew"
    return Finding(kernel.DEVICE, "advisory" if lacks or loaded not in (None, own) else "ok", words)


def _loaded(module: str) -> str | None:
    """Return the version of a loaded module; None if it is not loaded, or has no version."""
    try:
        return procfs.text(MODULES / module / "version")
    except OSError:
        return None
