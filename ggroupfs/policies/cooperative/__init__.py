"""``cooperative``: as ``dynamic``, with a program in the second group that gives memory back by itself (GhostAC).

What it gives back it need not keep: a cache, activations that can be computed again (Ghost, section 4.2). It is asked
through its usermemfd, as with any limit that falls below what a group has; and it has 50 ms, then the rest is moved. So
it is asked early, since that costs no move, and for no more at a time than it frees in that time.
"""

from __future__ import annotations

from ggroupfs.client import Tree
from ggroupfs.policies.config import Table
from ggroupfs.policies.dynamic.program import manage
from ggroupfs.policies.dynamic.settings import Manner, read

MIB = 1 << 20

MANNER = Manner(early=True, least=64 * MIB, most=512 * MIB)
"""Small steps, smaller still if the program does not keep up."""


async def run(tree: Tree, config: Table) -> None:
    """The policy, as a program."""
    await manage(tree, read(tree, config, MANNER))
