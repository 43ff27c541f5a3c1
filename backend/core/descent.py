"""The families that a process is in by its parents, where it says nothing of them itself.

A child that was given another environment, or that has not the library, is found by `PPid` when it comes to a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from backend.core.families import Families
from backend.process import procfs

PARENTS_MOST = 64
"""Parents of a process that are looked at: those of a longer chain are not found."""


def _chain(pid: int) -> Iterator[procfs.Descent]:
    """The descents of a process and of those above it, until one is gone."""
    for _ in range(PARENTS_MOST):
        try:
            descent = procfs.descent(pid)
        except OSError:
            return
        yield descent
        pid = descent.parent
        if not pid:
            return


def families_above(pid: int, known: Callable[[int], Families]) -> Families:
    """The families that a process is in by its nearest parent that is in any; none where no parent is.

    `known` says those of the process that bears a number and lives. The chain is read twice: a number in between that
    was given to another process meanwhile would lead elsewhere. A family of another user but root has no say: no user
    has the processes of others in a family.
    """
    before = list(_chain(pid))
    for place, descent in enumerate(before):
        if families := known(descent.parent):
            uid = before[0].uid
            if before[: place + 1] != list(_chain(pid))[: place + 1]:
                return ()
            kept = []
            for family in families:
                if family.uid not in (0, uid):
                    break
                kept.append(family)
            return tuple(kept)
    return ()
