"""A mounted tree from outside, for programs: reading and writing its files, and the roles of policies and their jobs.

The functions for programs that look once need nothing but files. :class:`Tree` and :class:`Group` are for programs that
keep running, such as policies, and use trio. :class:`Job` is for programs that run under a policy of lanes, and
:class:`Latencies` for servers that report to the policy slo; both need nothing but Python. Each name is therefore
imported on first use. docs/policies/writing.md has examples.
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
"""Modules of the names that are not in `reading`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES.get(name, 'reading')}"), name)
