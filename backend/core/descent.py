"""The families that a process inherits from its parents, where it names none itself.

A child that was given another environment, or lacks the library, is found by `PPid` when it comes to a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from backend.core.families import Families
from backend.process import procfs

PARENTS_MOST = 64
"""Most parents of a process that are looked at; families further up a longer chain are not found."""


def _climb(pid: int, known: Callable[[int], Families]) -> tuple[list[procfs.Descent], Families]:
    """Return the chain of descents from a process up to the first that has a parent in a family, with that parent's
    families; no families where no parent is in any. A program's message waits for this, so nothing further up is read.
    """
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
    """Return the families of the nearest parent of a process that is in any; none where no parent is.

    `known` returns the families of the live process that bears a pid. The chain is read twice, since a pid in it may
    have been reused meanwhile and lead elsewhere. A family of a user other than root and the process's own is left out,
    with those below it: no user puts another user's processes into a family.
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
