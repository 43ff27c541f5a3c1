"""The families that a process is in by its parents, where it says nothing of them itself.

A child that was given another environment, or that has not the library, is found by `PPid` when it comes to a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from backend.core.families import Families
from backend.process import procfs

PARENTS_MOST = 64
"""Parents of a process that are looked at: those of a longer chain are not found."""


def _climb(pid: int, known: Callable[[int], Families]) -> tuple[list[procfs.Descent], Families]:
    """The descents of a process and of those above it up to the first whose parent is in a family, and the families of
    that parent; none where no parent is in any. A message waits for this: nothing is read beyond."""
    chain: list[procfs.Descent] = []
    while len(chain) < PARENTS_MOST:
        try:
            chain.append(procfs.descent(pid))
        except OSError:
            break
        pid = chain[-1].parent
        if not pid:
            break
        if families := known(pid):
            return chain, families
    return chain, ()


def families_above(pid: int, known: Callable[[int], Families]) -> Families:
    """The families that a process is in by its nearest parent that is in any; none where no parent is.

    `known` says those of the process that bears a number and lives. The chain is read twice: a number in between that
    was given to another process meanwhile would lead elsewhere. A family of another user but root has no say: no user
    has the processes of others in a family.
    """
    chain, families = _climb(pid, known)
    if not families or _climb(pid, known) != (chain, families):
        return ()
    uid = chain[0].uid
    kept = []
    for family in families:
        if family.user not in (0, uid):
            break
        kept.append(family)
    return tuple(kept)
