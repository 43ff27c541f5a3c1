"""Cooperation: a program is told when a tree wants memory of it back (usermemfd, docs/semantics.md)."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

RECORD = 16
"""Bytes of a record."""
LOOK_S = 0.1
"""Seconds between two looks for the file, which is there once the process is in the tree."""


def giving(mount: str) -> threading.Event:
    """What is set when memory is wanted, from the tree at `mount`; never where that is empty."""
    asked = threading.Event()
    if mount:
        threading.Thread(target=_listen, args=(f"{mount}/{os.getpid()}/0/usermemfd", asked), daemon=True).start()
    return asked


def _listen(path: str, asked: threading.Event) -> None:
    while not os.path.exists(path):
        time.sleep(LOOK_S)
    with open(path, "rb", buffering=0) as file:
        poller = select.poll()
        poller.register(file, select.POLLIN)
        while True:
            with contextlib.suppress(BlockingIOError):  # another look has read it
                if poller.poll(1000) and len(file.read(RECORD) or b"") == RECORD:
                    asked.set()
