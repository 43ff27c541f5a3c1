"""Forbidden lines of the kernel's log: the table of reports that fail a run."""

from __future__ import annotations

import re

REPORTS = (
    (r"\bBUG\b", "an assertion, an invalid access, a use of freed memory, sleeping or scheduling where one may not"),
    (r"\bWARNING:", "an assertion that let go on; every complaint of lockdep"),
    (r"\bOops\b", "an exception in the kernel"),
    (r"general protection", "the same, of a wild pointer"),
    (r"Kernel panic", "the end"),
    (r"\bKASAN:", "memory that is not there, or not any more"),
    (r"\bUBSAN:", "undefined behaviour"),
    (r"\bKCSAN:", "a data race"),
    (r"\bODEBUG:", "a timer, work or RCU head that was freed or initialised while in use"),
    (r"possible circular locking", "locks taken in two orders"),
    (r"possible recursive locking", "a lock taken twice"),
    (r"inconsistent lock state", "a lock that an interrupt takes too"),
    (r"bad unlock balance|held lock freed|lock held when returning", "a lock in the wrong hands"),
    (r"suspicious RCU usage", "a pointer used outside of its read-side section"),
    (r"sleeping function called", "sleeping where one may not"),
    (r"scheduling while atomic", "the same"),
    (r"refcount_t", "a count of references that is wrong"),
    (r"list_(add|del) corruption", "a list that two wrote at once"),
    (r"INFO: trying to register non-static key", "a lock that was not initialised"),
    (r"INFO: task .* blocked", "a task that waits for ever"),
    (r"rcu: INFO:|RCU stall|rcu.*detected stalls?", "a CPU that does not come out of a read-side section"),
    (r"soft lockup|hard LOCKUP", "a CPU that does not come out of the kernel"),
    (r"workqueue lockup|INFO: .*workqueue", "work that blocks all other"),
    (r"unreferenced object", "memory that nobody points to any more (kmemleak)"),
    (r"Objects remaining in|slab error|Redzone overwritten|Poison overwritten", "a cache that is not as it was left"),
    (r"invoked oom-killer|Out of memory", "a guest too small, or a leak"),
    (r"printk messages dropped", "what is lost may have been one of these"),
)
"""Patterns that no line of the kernel's log may match, with their meaning."""


def reports(log: str) -> list[str]:
    """Return the lines that are reports."""
    return [line for line in log.splitlines() if any(re.search(pattern, line) for pattern, _ in REPORTS)]


def excerpt(log: str, lines: int = 150) -> list[str]:
    """Return the log from the first report on; without one, its end."""
    rows = log.splitlines()
    found = reports(log)
    first = max(0, rows.index(found[0]) - 5) if found else max(0, len(rows) - lines)
    return rows[first : first + lines]
