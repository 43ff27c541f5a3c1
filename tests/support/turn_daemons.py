"""A machine's daemon as seen by programs whose turns change: while it lives, and after it was killed."""

from __future__ import annotations

import socket

from backend.core.protocols import Gpu
from backend.cuda.page import CounterPage
from backend.cuda.server import Session
from backend.ledgers.forwarding import ForwardingGpu
from backend.nvidia.gpu import NvidiaGpu
from tests.support.cuda_session import Program
from tests.support.harness import Harness
from tests.support.killed import Life


def first_gpu(h: Harness) -> NvidiaGpu:
    """Return the first GPU of a daemon, without its wrappers."""
    found: Gpu = h.controller.gpus[0]
    while isinstance(found, ForwardingGpu):
        found = found._inner
    assert isinstance(found, NvidiaGpu)
    return found


async def serve(
    session: Session, theirs: socket.socket, program: Program, life: Life, pages: list[CounterPage]
) -> None:
    """Serve a program until its connection ends. A killed daemon's page is not closed; it goes to `pages`."""
    try:
        await session.run()
    finally:
        if life.dead:
            pages.append(session._page)
        else:
            session.close()
        theirs.close()
        program.close()
