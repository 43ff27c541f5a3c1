"""Yields of the daemon's CPU that cost it next to nothing: its slices are as short as the kernel has them.

From Linux 6.18 a program that yields pays with all of the slice that it has left (kernel/sched/fair.c,
`yield_task_fair`): 1.4 ms on a machine of two CPUs, and more on larger ones, which requests then wait beside programs
that spin. Since 6.12 a program may ask for slices of another length (sched_setattr(2), `sched_runtime`); with the
shortest it pays 0.1 ms. A kernel that is older keeps no such length, and there the daemon does not yield.
"""

from __future__ import annotations

import ctypes
import platform
import struct

from backend.common import syscalls

SLICE_NS = 100_000
"""The length of the daemon's slices, nanoseconds: the shortest that Linux has (kernel/sched/syscalls.c)."""

# sched_setattr and sched_getattr: arch/x86/entry/syscalls/syscall_64.tbl; asm-generic/unistd.h for the others.
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
_ATTR = struct.Struct("=IIQiIQQQII")
"""struct sched_attr (uapi/linux/sched/types.h): size, policy, flags, nice, priority, runtime, deadline, period, and two
bounds of utilization."""
_OWN_SLICES = (0, 3)
"""SCHED_OTHER and SCHED_BATCH: the policies under which a program has slices of its own length."""


def shorten_slices() -> bool:
    """Asks for the shortest slices for this thread, and what it starts; whether the kernel keeps to them.

    Its policy and nice value stay what they are. No error where the kernel, a filter of system calls or a real-time
    policy is against it: the daemon works without.
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
