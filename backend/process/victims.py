"""Processes that are killed for the memory of a GPU, and those that never are.

As the kernel's OOM killer has it (mm/oom_kill.c): a process with an ``oom_score_adj`` of -1000 is spared, and so is
process 1. Besides, this daemon is, and a server of MPS: the memory that it holds is that of its clients, which may be
anywhere.
"""

from __future__ import annotations

import os
from functools import partial

from backend.process import procfs
from backend.process.identity import Process
from backend.process.looks import look

SPARED_ADJ = -1000
"""Value of ``oom_score_adj`` that spares a process (OOM_SCORE_ADJ_MIN of include/uapi/linux/oom.h)."""

MPS_SERVERS = frozenset(("nvidia-cuda-mps-server", "nvidia-cuda-mps-control"))
"""Names of the programs of MPS, as NVIDIA's packages install them."""


async def spared(process: Process) -> str | None:
    """Return why a process is never killed, in words; None for one that may be. ProcessLookupError."""
    pid = process.pid
    if pid == 1:
        return "it is process 1"
    if pid == os.getpid():
        return "it is this daemon"
    if int(procfs.of_process(pid, "oom_score_adj")) == SPARED_ADJ:  # waits for nothing: no lock of the process
        return f"its oom_score_adj is {SPARED_ADJ}"
    try:
        is_mps = await look(pid, partial(_is_mps, pid))
    except ProcessLookupError:
        raise
    except OSError:  # it does not let itself be looked at: no reason to spare it
        is_mps = False
    return "it is a server of MPS" if is_mps else None


def _is_mps(pid: int) -> bool:
    """Whether it runs a program of MPS. One of a user that is called so is none: root's alone are."""
    link = f"{procfs.PROC}/{pid}/exe"
    name = os.readlink(link).rpartition("/")[2]
    if name not in MPS_SERVERS:
        return False
    found = os.stat(link)
    return found.st_uid == 0 and not found.st_mode & 0o022
