"""What a daemon of a machine is to programs whose turns change, while it lives and once it is killed."""

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
    """The first GPU of a daemon, behind all that stands before it."""
    found: Gpu = h.controller.gpus[0]
    while isinstance(found, ForwardingGpu):
        found = found._inner
    assert isinstance(found, NvidiaGpu)
    return found


async def serve(
    session: Session, theirs: socket.socket, program: Program, life: Life, pages: list[CounterPage]
) -> None:
    """Serve a program until its connection ends. The page of a killed daemon goes to `pages`: nothing closes it."""
    try:
        await session.run()
    finally:
        if life.dead:
            pages.append(session._page)
        else:
            session.close()
        theirs.close()
        program.close()
