"""A mounted tree from outside: what any program can do with open, read, write and poll, in a handy form.

Reading, for programs that look once (:mod:`ggroupfs.client.reading`), needs nothing but files. :class:`Tree` and
:class:`Group` are for programs that stay, written with trio: policies. trio is imported with them and not before, so
that a program which needs the rest alone does without. docs/policies.md has an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggroupfs.client.events import emit
from ggroupfs.client.reading import Branch, Member, branches, content, flat, members, numbers, require_tree

if TYPE_CHECKING:
    from ggroupfs.client.tree import Group, Tree, Watch

__all__ = [
    "Branch",
    "Group",
    "Member",
    "Tree",
    "Watch",
    "branches",
    "content",
    "emit",
    "flat",
    "members",
    "numbers",
    "require_tree",
]


def __getattr__(name: str) -> Any:
    if name in ("Group", "Tree", "Watch"):
        from ggroupfs.client import tree

        return getattr(tree, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
