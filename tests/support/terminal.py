"""A program on a real pseudo-terminal, and what a terminal would show of it (pyte)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence

import pyte

from tests.support.mounted import SECONDS, SLOW

UP, DOWN, LEFT, RIGHT, HOME, END, PAGE_DOWN = "\x1b[A", "\x1b[B", "\x1b[D", "\x1b[C", "\x1b[H", "\x1b[F", "\x1b[6~"
ENTER, ESCAPE = "\r", "\x1b"

ALTERNATE = 1049
"""The private mode of xterm in which a program has a screen of its own, and leaves the one before as it was."""


class Emulated(pyte.Screen):
    """pyte knows no other screen: it is enough to know which one is shown."""

    alternate = False
    """Whether the program has its own."""

    def set_mode(self, *modes: int, **keywords: bool) -> None:
        self.alternate |= keywords.get("private", False) and ALTERNATE in modes
        super().set_mode(*modes, **keywords)

    def reset_mode(self, *modes: int, **keywords: bool) -> None:
        self.alternate &= not (keywords.get("private", False) and ALTERNATE in modes)
        super().reset_mode(*modes, **keywords)


class Terminal:
    """The keyboard and the screen."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int, columns: int, rows: int) -> None:
        self.process = process
        """Who is in it."""
        self._master, self._slave = master, slave
        self.screen = Emulated(columns, rows)
        """What is shown now."""
        self._stream = pyte.ByteStream(self.screen)
        self.received = 0
        """Bytes that came from the program, ever."""

    @property
    def text(self) -> str:
        """All of the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def settings(self) -> list[object]:
        """What tcgetattr(3) says of the terminal."""
        return termios.tcgetattr(self._slave)

    def line(self, words: str) -> str:
        """The line that has `words` in it; AssertionError if it is not exactly one."""
        (found,) = [line for line in self.text.splitlines() if words in line] or [""]
        return found

    def press(self, keys: str) -> None:
        """Types."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Another size, of which the program hears with SIGWINCH."""
        self.screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Takes what comes until the screen is as it should be. Not before the deadline is it known not to be."""
        deadline = time.monotonic() + SECONDS * SLOW
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0 or not self._take(left):
                raise AssertionError(f"never: {what}\n{self.text}")

    def shows(self, words: str) -> None:
        """Waits until `words` are on the screen."""
        self.until(lambda: words in self.text, f"{words!r} on the screen")

    def take_rest(self) -> None:
        """What the program says until it has ended."""
        self.until(lambda: self.process.poll() is not None, "it ends")
        while self._take(0):
            pass

    def _take(self, seconds: float) -> bool:
        """Whether something came. Looks up now and then: the end of a program comes without a byte."""
        ready, _, _ = select.select([self._master], [], [], min(seconds, 0.1))
        if not ready:
            return seconds > 0
        with contextlib.suppress(OSError):  # EIO: everybody else closed it
            data = os.read(self._master, 1 << 16)
            self.received += len(data)
            self._stream.feed(data)
            return True
        return False


@contextlib.contextmanager
def terminal(words: Sequence[str], columns: int = 80, rows: int = 24, **environment: str) -> Iterator[Terminal]:
    """Starts a program in a session of its own, which has the terminal; at the end it is killed if it still runs."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        words,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""} | environment,
    )
    try:
        yield Terminal(process, master, slave, columns, rows)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
