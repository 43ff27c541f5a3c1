"""A daemon at the socket of a program that ends its turns and begins them."""

from __future__ import annotations

import socket
from pathlib import Path

from backend.cuda.page import CounterPage
from backend.door.wire import Message, Op
from tests.t6_cuda.harness import SECONDS, BookingDaemon, eventually


class TurningDaemon(BookingDaemon):
    """One that ends and begins turns."""

    def __init__(self, path: Path) -> None:
        self.managed = 0
        """How often a program has said what it has."""
        super().__init__(path)

    def _hear(self, connection: socket.socket, heard: Message, page: CounterPage) -> None:
        """The same, but what is no answer to RECLAIM moves nothing in the books."""
        if heard.reply and heard.op != Op.RECLAIM:
            self.answers.put(heard)
            return
        if not heard.reply and heard.op == Op.MANAGE:
            self.resident, self.swapped = heard.args[:2]
        super()._hear(connection, heard, page)
        self.managed += not heard.reply and heard.op == Op.MANAGE

    def say(self, op: Op, args: tuple[int, ...], gpu: int = 0) -> None:
        """Asks, and waits for no answer."""
        self._connections[-1].send(Message(op, 79, gpu, args).encode())

    def ask(self, op: Op, word: int, gpu: int = 0) -> Message:
        """Its answer."""
        self.say(op, (word,), gpu)
        answer = self.answers.get(timeout=SECONDS)
        assert answer.op == op
        return answer

    def end_turn(self, microseconds: int = 1_000_000, gpu: int = 0) -> bool:
        """Whether it is drained."""
        return bool(self.ask(Op.END_TURN, microseconds, gpu).check().args[0])

    def begin_turn(self, run_ahead_us: int = 0, gpu: int = 0) -> None:
        """Lets it go on."""
        self.ask(Op.BEGIN_TURN, run_ahead_us, gpu).check()

    def hang_up(self) -> None:
        """Ends the connection; returns once it is managed by another."""
        before = self.managed
        self._connections[-1].shutdown(socket.SHUT_RDWR)
        eventually(lambda: self.managed > before, lambda: "it does not connect again")
