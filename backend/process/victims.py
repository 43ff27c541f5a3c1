"""Which processes may be killed for the memory of a GPU.

As for the kernel's OOM killer (mm/oom_kill.c), process 1 and any process with an ``oom_score_adj`` of -1000 are
spared. So are this daemon, and the programs of MPS that root runs where the daemon runs: the memory of an MPS server
is that of its clients, which may be anywhere. A server runs as the user of its clients, as a child of the control
daemon, and is recognised by that. Its name alone proves nothing: any user may give it to a program, or put a library
into NVIDIA's; so may root of a container, whose programs are in another mount namespace.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial

from backend.process import procfs
from backend.process.identity import Process
from backend.process.looks import look

SPARED_ADJ = -1000
"""Value of ``oom_score_adj`` that spares a process (OOM_SCORE_ADJ_MIN of include/uapi/linux/oom.h)."""

CAP_KILL = 1 << 5
"""Bit of the capability to signal processes of other users (include/uapi/linux/capability.h)."""

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
"""Names of the MPS programs, as NVIDIA's packages install them."""

REPLACED = " (deleted)"
"""Suffix of the path of a program whose file was removed, as by an upgrade of its package (d_path() of the kernel)."""


def may_kill_any() -> bool:
    """Return whether this process may signal those of every user (kill_ok_by_cred() of kernel/signal.c)."""
    return bool(int(procfs.keyed(procfs.of_process("self", "status"))[b"CapEff"], 16) & CAP_KILL)


async def spared(process: Process) -> str | None:
    """Return why a process must not be killed, in words; None if it may be. Raises ProcessLookupError
    when it is gone.
    """
    pid = process.pid
    if pid == 1:
        return "it is process 1"
    if pid == os.getpid():
        return "it is this daemon"
    if int(procfs.of_process(pid, "oom_score_adj")) == SPARED_ADJ:  # takes no lock of the process, so does not wait
        return f"its oom_score_adj is {SPARED_ADJ}"
    descent = procfs.descent(pid)  # does not wait either; the owner of /proc/<pid> may be root for any process
    if not descent.uid:
        return await _why(pid, (CONTROL, SERVER))
    if descent.parent and not _uid(descent.parent):
        return await _why(descent.parent, (CONTROL,))
    return None


async def _why(pid: int, names: Collection[str]) -> str | None:
    """Return why a process is spared, if process `pid`, which is root's, runs a program of these names; else None."""
    try:
        return "it is of MPS" if await look(pid, partial(_runs, pid, names)) else None
    except ProcessLookupError:
        return None
    except OSError:  # it cannot be looked at now: spared, and looked at again
        return "it may be of MPS"


def _runs(pid: int, names: Collection[str]) -> bool:
    """Return whether a process runs one of these programs, as installed by root here. May not return."""
    link = f"/proc/{pid}/exe"
    try:
        name = os.readlink(link).removesuffix(REPLACED).rpartition("/")[2]
        if name not in names or os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
            return False
        found = os.stat(link)
    except FileNotFoundError:  # it ends, or is a kernel thread
        return False
    return found.st_uid == 0 and not found.st_mode & 0o022


def _uid(pid: int) -> int | None:
    """Return the user that a process runs as; None when it is gone."""
    try:
        return procfs.descent(pid).uid
    except ProcessLookupError:
        return None
