"""Carries out a plan and reports each move."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import trio

from ggroupfs.client import Group, emit
from ggroupfs.policies.balance.choice import Plan
from ggroupfs.policies.balance.core import Core
from ggroupfs.policies.balance.picture import Move, Picture
from ggroupfs.text.refusals import NAMES

log = logging.getLogger(__name__)

DEADLINE_S = 60.0
"""Default deadline of a move, seconds."""


async def carry_out(
    core: Core, picture: Picture, plan: Plan, group_of: Callable[[str, int], Group], seconds: float
) -> list[Move]:
    """Make the moves of a plan, each within `seconds`, and return those that succeeded.

    The first refusal ends the plan, because the remaining moves were chosen to go with the refused one.
    """
    made = []
    for move in plan.moves:
        load = move.load
        what = {"group": load.name, "gpu": load.gpu, "to": move.to}
        emit("move", **what, bytes=load.held, want=round(load.want, 2), critical=load.bound is not None)
        began = trio.current_time()
        try:
            await group_of(load.name, load.gpu).migrate(move.to, seconds)
        except OSError as error:
            core.refused(trio.current_time(), picture, move, error.errno or errno.EIO)
            log.info("%s: not moved from GPU %d to GPU %d: %s", load.name, load.gpu, move.to, error.strerror)
            emit("refused", **what, error=NAMES.get(error.errno or 0, "EIO"))
            break
        ended = trio.current_time()
        core.moved(ended, picture, move)
        log.info("%s: moved from GPU %d to GPU %d", load.name, load.gpu, move.to)
        emit("moved", **what, seconds=round(ended - began, 3))
        made.append(move)
    return made
