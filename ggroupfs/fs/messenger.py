"""What the kernel is told of its own accord: by one thread, since each message may wait for our own mount's answer.

pyfuse3 has such a thread (`invalidate_entry_async`), but none can wait for it: it goes on with a session that
has been freed, and a descriptor that may be of another file by then. Ours is ended before the mount is.
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
"""How long the end waits for a message that is under way."""

AGAIN_S = 1.0
"""Seconds after which a caller that waits looks again for a thread, where none was to be had."""


class Messenger:
    """Makes calls that may block, in the order in which they were posted, until it is ended."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._short = False  # no thread was to be had, and it was told of

    def post(self, call: Callable[[], None]) -> None:
        """Has it called soon; after the end: never."""
        self._calls.put(call)
        self._start()

    def _start(self) -> None:
        if self._thread is None and not self._ended:
            thread = threading.Thread(target=self._work, name="messenger", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # pthread_create(3), EAGAIN: with the next call
                if not self._short:
                    log.warning("no thread for messages to the kernel: %s", error)
                self._short = True
            else:
                self._thread, self._short = thread, False

    async def deliver(self, call: Callable[[], None]) -> None:
        """Has it called, and waits until it was; after the end: for ever."""
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
        """Drops what was not begun, and waits END_S for what was; whether no message is under way then."""
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
            except Exception:  # one message that cannot be delivered is no reason to keep the others
                log.exception("a message to the kernel failed")
