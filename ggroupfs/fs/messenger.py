"""Sends unsolicited messages to the kernel from a thread, because each may wait for an answer of this very mount.

pyfuse3 has such a thread (`invalidate_entry_async`), but nothing can wait for it to end: it continues with a session
that has been freed, and with a descriptor that may belong to another file by then. This thread ends before the mount.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

import trio

log = logging.getLogger(__name__)

END_S = 1.0
"""Seconds for which the end waits for a message that is under way."""

AGAIN_S = 1.0
"""Seconds after which a waiting caller tries again to start the thread, if that failed."""


class Messenger:
    """Makes calls that may block, in the order in which they were posted, until it is ended."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._short = False  # no thread could be started, and that was logged

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` made soon. After the end it is never made."""
        self._calls.put(call)
        self._start()

    def _start(self) -> None:
        if self._thread is None and not self._ended:
            thread = threading.Thread(target=self._work, name="messenger", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # EAGAIN of pthread_create(3): the next call tries again
                if not self._short:
                    log.warning("no thread for messages to the kernel: %s", error)
                self._short = True
            else:
                self._thread, self._short = thread, False

    async def deliver(self, call: Callable[[], None]) -> None:
        """Have `call` made, and wait until it was. After the end this waits for ever."""
        called, token = trio.Event(), trio.lowlevel.current_trio_token()

        def report() -> None:
            try:
                call()
            finally:
                with contextlib.suppress(trio.RunFinishedError):
                    token.run_sync_soon(called.set)

        self.post(report)
        while not called.is_set():
            with trio.move_on_after(AGAIN_S):
                await called.wait()
            self._start()

    def end(self) -> bool:
        """Drop the calls not begun, wait END_S for the one under way, and return whether none is under way any more."""
        self._ended = True
        self._calls.put(None)
        if self._thread is None:
            return True
        self._thread.join(END_S)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._ended:
            try:
                call()
            except Exception:  # one failed message must not hold up the rest
                log.exception("a message to the kernel failed")
