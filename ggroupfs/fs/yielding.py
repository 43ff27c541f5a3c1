"""Makes yields of the CPU cheap for the daemon, by asking the kernel for its shortest slices.

Since Linux 6.18 a program that yields gives up the rest of its slice (kernel/sched/fair.c, `yield_task_fair`): 1.4 ms
on a machine with two CPUs, and more on larger ones. Requests then wait that long next to programs that spin. Since 6.12
a program may ask for another slice length (sched_setattr(2), `sched_runtime`); with the shortest one a yield costs 0.1
ms. An older kernel does not keep the length, and there the daemon does not yield.
"""

from __future__ import annotations

import ctypes
import platform
import struct

from backend.common import syscalls

SLICE_NS = 100_000
"""Length of the daemon's slices, nanoseconds: the shortest that Linux allows (kernel/sched/syscalls.c)."""

# sched_setattr and sched_getattr: arch/x86/entry/syscalls/syscall_64.tbl; asm-generic/unistd.h for the rest.
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
_ATTR = struct.Struct("=IIQiIQQQII")
"""struct sched_attr (uapi/linux/sched/types.h): size, policy, flags, nice, priority, runtime, deadline, period, and two
bounds of utilization."""
_OWN_SLICES = (0, 3)
"""Policies under which a program has slices of its own length: SCHED_OTHER and SCHED_BATCH."""


def shorten_slices() -> bool:
    """Ask for the shortest slices for this thread and its children, and return whether the kernel keeps the length.

    The policy and the nice value stay. It is no error if the kernel, a filter of system calls or a real-time policy
    prevents this: the daemon works without.
    """
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return False
    set_attr, get_attr = calls
    raw = ctypes.create_string_buffer(_ATTR.size)
    try:
        syscalls.call(get_attr, 0, raw, _ATTR.size, 0)
        size, policy, flags, nice, priority, _, *rest = _ATTR.unpack(raw.raw)
        if policy not in _OWN_SLICES:
            return False
        syscalls.call(set_attr, 0, _ATTR.pack(size, policy, flags, nice, priority, SLICE_NS, *rest), 0)
        syscalls.call(get_attr, 0, raw, _ATTR.size, 0)
    except OSError:
        return False
    kept: int = _ATTR.unpack(raw.raw)[5]
    return kept == SLICE_NS
