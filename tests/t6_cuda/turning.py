"""A daemon, at the socket of a program, that ends and begins its turns."""

from __future__ import annotations

import socket
from pathlib import Path

from backend.cuda.page import CounterPage
from backend.door.wire import Message, Op
from tests.t6_cuda.harness import SECONDS, BookingDaemon, eventually


class TurningDaemon(BookingDaemon):
    """A daemon that ends and begins turns."""

    def __init__(self, path: Path) -> None:
        self.managed = 0
        """Number of times that a program has reported its memory."""
        super().__init__(path)

    def _hear(self, connection: socket.socket, heard: Message, page: CounterPage) -> None:
        """Hear a message as the base class does, but let only answers to RECLAIM move bytes in the books."""
        if heard.reply and heard.op != Op.RECLAIM:
            self.answers.put(heard)
            return
        if not heard.reply and heard.op == Op.MANAGE:
            self.resident, self.swapped = heard.args[:2]
        super()._hear(connection, heard, page)
        self.managed += not heard.reply and heard.op == Op.MANAGE

    def say(self, op: Op, args: tuple[int, ...], gpu: int = 0) -> None:
        """Send a request, and wait for no answer."""
        self._connections[-1].send(Message(op, 79, gpu, args).encode())

    def ask(self, op: Op, word: int, gpu: int = 0) -> Message:
        """Send a request, and return its answer."""
        self.say(op, (word,), gpu)
        answer = self.answers.get(timeout=SECONDS)
        assert answer.op == op
        return answer

    def end_turn(self, microseconds: int = 1_000_000, gpu: int = 0) -> bool:
        """End the turn; return whether the GPU has drained."""
        return bool(self.ask(Op.END_TURN, microseconds, gpu).check().args[0])

    def begin_turn(self, run_ahead_us: int = 0, gpu: int = 0) -> None:
        """Begin a turn."""
        self.ask(Op.BEGIN_TURN, run_ahead_us, gpu).check()

    def hang_up(self) -> None:
        """End the connection; return once the program is managed by another."""
        before = self.managed
        self._connections[-1].shutdown(socket.SHUT_RDWR)
        eventually(lambda: self.managed > before, lambda: "it does not connect again")
