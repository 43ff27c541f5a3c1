"""A job of the policy `lanes`, for training programs: announces the end of each iteration and waits for its turn.

Plain Python and a socket: it needs no other package and starts no thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import AF_UNIX, SHUT_RDWR, SOCK_STREAM
from socket import socket as Socket
from types import TracebackType

from ggroupfs.client.protocol import BYE, DEFAULT_SOCKET, END, GO, REFUSED, Announcement, Lines

PATIENCE_S = 10.0
"""Seconds for which a job waits for a policy that broke off to come back. Its unit restarts it after 5 s, and until
then the job may be frozen, so there is nothing it could do on the GPU."""
RETRY_S = 0.1

NS = 1_000_000_000


class Job:
    """This process, as a job: a context to enter before the process uses the GPU, and to leave when it no longer does.

    On entry the job is announced and waits for its first turn, which lasts until the end of its first iteration. The
    program loads its model in that turn too, which counts as run time; a model that certainly fits may be loaded
    before. If the policy ends, the job continues without it, and announces itself again once there is one.
    """

    def __init__(
        self,
        *,
        persistent: int,
        ephemeral: int,
        duration: float,
        name: str = "",
        settle: Callable[[], object] | None = None,
        socket: str | os.PathLike[str] = DEFAULT_SOCKET,
    ) -> None:
        """`persistent` and `ephemeral` are bytes: memory held throughout, and additional memory during an iteration.

        `duration` is the run time with the GPU to itself, in seconds. `settle` is called at the end of each iteration
        and returns once all its work on the GPU is done: ``torch.cuda.synchronize``. ValueError for invalid numbers.
        """
        self._announcement = Announcement(name, persistent, ephemeral, int(duration * NS))
        self._announcement.line()
        self._settle = settle
        self._place = Path(socket)
        self._socket: Socket | None = None
        self._lines = Lines()
        self._may = False
        self.ran = 0
        """Time in which the job had its turn, nanoseconds."""
        self._since = 0

    def __enter__(self) -> Job:
        """FileNotFoundError or ConnectionRefusedError if there is no policy; ENOMEM if the job is refused."""
        self._connect()
        self._turn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._hang_up()

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """One iteration: wait for the turn, run the body, then settle and announce the end."""
        if self._socket is None:
            self._try_again()
        self._turn()
        try:
            yield
        finally:
            if self._settle is not None:
                self._settle()
            self._end()

    def _connect(self) -> None:
        connection = Socket(AF_UNIX, SOCK_STREAM)
        try:
            connection.connect(os.fspath(self._place))
            left = max(0, self._announcement.duration - self.ran)
            connection.sendall(self._announcement._replace(duration=left).line())
        except BaseException:
            connection.close()
            raise
        self._socket, self._lines, self._may = connection, Lines(), False

    def _try_again(self) -> None:
        """Connect again if a policy is there; otherwise the job continues on its own."""
        with contextlib.suppress(FileNotFoundError, ConnectionError):
            self._connect()

    def _turn(self) -> None:
        """Return when the job has its turn, or when there is no policy to give it one."""
        while self._socket is not None and not self._may:
            for line in self._receive():
                if line == GO:
                    self._may = True
                elif line.startswith(REFUSED):
                    self._hang_up()
                    raise OSError(errno.ENOMEM, line.removeprefix(REFUSED), os.fspath(self._place))
                elif line == BYE:
                    self._hang_up()
                    self._try_again()
        self._since = time.monotonic_ns()

    def _receive(self) -> list[str]:
        assert self._socket is not None
        try:
            data = self._socket.recv(4096)
        except ConnectionError:
            data = b""
        if data:
            return self._lines.feed(data)
        self._hang_up()
        deadline = time.monotonic() + PATIENCE_S
        while self._socket is None and time.monotonic() < deadline:
            self._try_again()
            if self._socket is None:
                time.sleep(RETRY_S)
        return []

    def _end(self) -> None:
        self.ran += time.monotonic_ns() - self._since
        self._may = False
        if self._socket is not None:
            # If the policy is gone, the next turn finds that out.
            with contextlib.suppress(ConnectionError):
                self._socket.sendall(f"{END}\n".encode())

    def _hang_up(self) -> None:
        assert self._socket is not None
        # Shutdown as well as close: children forked since then have the socket too.
        with contextlib.suppress(OSError):
            self._socket.shutdown(SHUT_RDWR)
        self._socket.close()
        self._socket = None
