"""``dynamic``: memory that one group does not use goes to another one, and comes back when it is wanted (GhostFT,
GVM-DYN)."""

from __future__ import annotations

from ggroupfs.client import Tree
from ggroupfs.policies.config import Table
from ggroupfs.policies.dynamic.program import manage
from ggroupfs.policies.dynamic.settings import Manner, read

GIB = 1 << 30

MANNER = Manner(early=False, least=GIB, most=GIB)
"""What is taken goes to the host: seldom, then, and in pieces that take some 30 ms each, so that what the first one
waits for does not come behind what it will want later."""


async def run(tree: Tree, config: Table) -> None:
    """The policy, as a program."""
    await manage(tree, read(tree, config, MANNER))
