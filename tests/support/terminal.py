"""A program on a real pseudo-terminal, and the screen that a terminal would show (pyte)."""

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
"""Private mode of xterm that gives a program a screen of its own and later restores the one before."""


class Emulated(pyte.Screen):
    """A screen that records which of the two screens is shown; pyte emulates only one."""

    alternate = False
    """Whether the program has its own screen."""

    def set_mode(self, *modes: int, **keywords: bool) -> None:
        self.alternate |= keywords.get("private", False) and ALTERNATE in modes
        super().set_mode(*modes, **keywords)

    def reset_mode(self, *modes: int, **keywords: bool) -> None:
        self.alternate &= not (keywords.get("private", False) and ALTERNATE in modes)
        super().reset_mode(*modes, **keywords)


class Terminal:
    """The keyboard and the screen of a program."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int, columns: int, rows: int) -> None:
        self.process = process
        """Process on the terminal."""
        self._master, self._slave = master, slave
        self.screen = Emulated(columns, rows)
        """Present contents."""
        self._stream = pyte.ByteStream(self.screen)
        self.received = 0
        """Number of bytes that the program has written."""

    @property
    def text(self) -> str:
        """Return the text of the whole screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def settings(self) -> list[object]:
        """Return what tcgetattr(3) reports for the terminal."""
        return termios.tcgetattr(self._slave)

    def line(self, words: str) -> str:
        """Return the only line that contains `words`; AssertionError for none or several."""
        (found,) = [line for line in self.text.splitlines() if words in line] or [""]
        return found

    def press(self, keys: str) -> None:
        """Type `keys`."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, of which SIGWINCH tells the program."""
        self.screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Read output until the screen meets a condition. It fails only at the deadline."""
        deadline = time.monotonic() + SECONDS * SLOW
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0 or not self._take(left):
                raise AssertionError(f"never: {what}\n{self.text}")

    def shows(self, words: str) -> None:
        """Wait until `words` are on the screen."""
        self.until(lambda: words in self.text, f"{words!r} on the screen")

    def take_rest(self) -> None:
        """Read the output of the program until it has ended."""
        self.until(lambda: self.process.poll() is not None, "it ends")
        while self._take(0):
            pass

    def _take(self, seconds: float) -> bool:
        """Return whether output came. Wakes up now and then, since a program may end without writing a byte."""
        ready, _, _ = select.select([self._master], [], [], min(seconds, 0.1))
        if not ready:
            return seconds > 0
        with contextlib.suppress(OSError):  # EIO: every other process has closed it
            data = os.read(self._master, 1 << 16)
            self.received += len(data)
            self._stream.feed(data)
            return True
        return False


@contextlib.contextmanager
def terminal(words: Sequence[str], columns: int = 80, rows: int = 24, **environment: str) -> Iterator[Terminal]:
    """Start a program in a session of its own, which has the terminal; kill it at the end if it still runs."""
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
