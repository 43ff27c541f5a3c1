"""``dynamic``: lends memory that one group does not use to another, and takes it back on demand (GhostFT, GVM-DYN)."""

from __future__ import annotations

from ggroupfs.client import Tree
from ggroupfs.policies.config import Table
from ggroupfs.policies.dynamic.program import manage
from ggroupfs.policies.dynamic.settings import Manner, read

GIB = 1 << 30

MANNER = Manner(early=False, least=GIB, most=GIB)
"""Memory is taken by moving it to the host. Moves are therefore rare, and made in pieces of about 30 ms each, so that
memory the high group needs now does not queue behind memory that it will need later."""


async def run(tree: Tree, config: Table) -> None:
    """Run the policy until it is cancelled."""
    await manage(tree, read(tree, config, MANNER))
