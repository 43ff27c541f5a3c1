"""Level 6: chunks that move under kernels, copies and allocations of several threads (unit/unit.c)."""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
from pathlib import Path

import pytest

from backend.cuda.page import CounterPage
from backend.door.wire import SIZE, Message, Op
from tests.t6_cuda.harness import SECONDS, GrantingDaemon, eventually, running
from tests.t6_cuda.units import run_unit

MIB = 1 << 20


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_exact_under_random_limits(sanitize: str) -> None:
    """Three threads allocate, launch, check and free, while the limit changes as fast as it can be met."""
    assert "reclaims" in run_unit("stress", sanitize, UNIT_SECONDS="4")


@pytest.mark.parametrize("sanitize", ["", "thread"])
@pytest.mark.parametrize(
    "name",
    [
        *("persistent", "queue", "contexts", "pin", "heat", "heat_in_one", "stuck"),
        *("exchange", "exchange_by_itself", "exchange_more"),
    ],
)
def test_unit(name: str, sanitize: str) -> None:
    run_unit(name, sanitize)


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_chunks_of_the_host_are_made_ahead(sanitize: str) -> None:
    run_unit("ahead", sanitize, GGROUP_CUDA_POOL="32")


class BookingDaemon(GrantingDaemon):
    """One that asks for memory, lets it back when told to, and keeps the books of what it hears."""

    resident = 0
    swapped = 0
    room = False
    """Whether MOVE_IN is granted."""

    def _serve(self, connection: socket.socket) -> None:
        page = CounterPage()
        self.pages.append(page)
        self.answers: queue.Queue[Message] = queue.Queue()
        with contextlib.suppress(OSError):
            while raw := connection.recv(SIZE):
                self._hear(connection, Message.decode(raw), page)

    def _hear(self, connection: socket.socket, heard: Message, page: CounterPage) -> None:
        if heard.reply:
            self.resident -= heard.args[0]
            self.swapped += heard.args[0]
            self.answers.put(heard)
            return
        answer = heard.answer()
        match heard.op:
            case Op.HELLO:
                answer = heard.answer(1, 2 << 20, 2000)
            case 4:  # LOCATE
                answer = heard.answer(heard.args[1] >> 56)
            case 6:  # CHARGE
                self.resident += heard.args[0]
            case 7:  # UNCHARGE
                self.resident -= heard.args[0]
                self.swapped -= heard.args[1]
            case 8 if not self.room:  # MOVE_IN
                answer = heard.refuse(errno.EAGAIN)
            case 8:
                self.resident += heard.args[0]
                self.swapped -= heard.args[0]
            case 9:  # LIMITS
                answer = heard.answer(64 << 20, 1 << 20, self.swapped)
        if heard.seq:
            fds = [page.descriptor] if heard.op == 5 else []
            socket.send_fds(connection, [answer.encode()], fds)

    def reclaim(self, nbytes: int) -> int:
        """Asks the program to move so much out; what it says it has moved."""
        self._connections[-1].send(Message(Op.RECLAIM, 77, 0, (0, 0, 0, nbytes)).encode())
        return self.answers.get(timeout=SECONDS).check().args[0]


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_a_program_that_knows_nothing(tmp_path: Path, sanitize: str) -> None:
    """All of it together: the library loaded into a program, and a daemon at its socket."""
    path = tmp_path / "socket"
    daemon = BookingDaemon(path)
    try:
        extra = {"GGROUP_SOCKET": str(path), "GGROUP_CUDA_POOL": "0"}
        with running("mem_moves", tmp_path=tmp_path, sanitize=sanitize, extra=extra) as program:
            assert program.hears("gpu") == 22
            assert (daemon.resident, daemon.swapped) == (22 * MIB, 0)
            assert daemon.reclaim(12 * MIB) >= 12 * MIB
            assert daemon.resident + daemon.swapped == 22 * MIB
            program.go()
            assert program.hears("gpu") == daemon.resident // MIB
            daemon.room = True
            eventually(lambda: not daemon.swapped, lambda: f"{daemon.swapped} bytes stay away")
            # What is granted is on its way: the program waits for its own copies to be right.
            program.go()
            assert program.hears("gpu") <= 22 + 20
            program.go()
            assert program.hears("total") == 64
            program.go()
            program.ends()
        assert daemon.swapped == 0
    finally:
        daemon.close()
