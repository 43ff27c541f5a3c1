"""``cooperative``: the policy ``dynamic`` for a low group that gives memory back by itself (GhostAC).

The program frees what it need not keep, such as caches and activations that can be computed again (Ghost, section 4.2).
Like any program over its limit, it is told through its usermemfd and has 50 ms; the rest is then
moved to the host. Memory that the program frees costs no move, so this policy asks early, and each time for no more
than the program frees within the 50 ms.
"""

from __future__ import annotations

from ggroupfs.client import Tree
from ggroupfs.policies.config import Table
from ggroupfs.policies.dynamic.program import manage
from ggroupfs.policies.dynamic.settings import Manner, read

MIB = 1 << 20

MANNER = Manner(early=True, least=64 * MIB, most=512 * MIB)
"""Small steps; :class:`~ggroupfs.policies.dynamic.pace.Pace` shrinks them further if the program does not keep up."""


async def run(tree: Tree, config: Table) -> None:
    """Run the policy until it is cancelled."""
    await manage(tree, read(tree, config, MANNER))
