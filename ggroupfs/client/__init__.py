"""A mounted tree from outside: what any program can do with open, read, write and poll, in a handy form.

Reading, for programs that look once, needs nothing but files. :class:`Tree` and :class:`Group` are for programs that
stay, written with trio: policies. :class:`Job` is for programs that a policy of lanes is to take in, and
:class:`Latencies` for servers whose latency slo is to know; both need nothing but Python. So each is imported when it
is asked for. docs/policies/writing.md has examples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggroupfs.client.events import emit
    from ggroupfs.client.job import Job
    from ggroupfs.client.latencies import Latencies
    from ggroupfs.client.reading import (
        GONE,
        Branch,
        Member,
        branches,
        content,
        flat,
        has_our_pids,
        members,
        numbers,
        require_tree,
    )
    from ggroupfs.client.tree import Group, Tree, Watch

__all__ = [
    "GONE",
    "Branch",
    "Group",
    "Job",
    "Latencies",
    "Member",
    "Tree",
    "Watch",
    "branches",
    "content",
    "emit",
    "flat",
    "has_our_pids",
    "members",
    "numbers",
    "require_tree",
]

MODULES = {
    "emit": "events",
    "Job": "job",
    "Latencies": "latencies",
    **dict.fromkeys(("Group", "Tree", "Watch"), "tree"),
}
"""Where they are; the rest is in `reading`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES.get(name, 'reading')}"), name)
