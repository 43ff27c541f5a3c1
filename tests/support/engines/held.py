"""A job of an engine: a program of the software GPU that takes more memory than its limit and reports what it holds."""

from __future__ import annotations

import os
import time
from pathlib import Path

from backend.soft.client import Device

PATIENCE_S = 300.0
"""Seconds in which a job that does not hang is let go, however busy the machine is."""


def held(mount: str, nbytes: int, going: str) -> tuple[int, int, int]:
    """Take `nbytes`, note that in a file of the directory `going`, and wait for the file ``go`` there. Return the
    process, its limit and the bytes that it held. TimeoutError if ``go`` does not come."""
    with Device(mount) as device:
        device.join()
        device.alloc(nbytes)
        control = Path(mount) / str(os.getpid()) / "0"
        told = os.getpid(), int((control / "gmem.limit.high").read_text()), int((control / "gmem.current").read_text())
        place = Path(going)
        (place / f"pid-{time.monotonic_ns()}").write_text(str(os.getpid()))
        end = time.monotonic() + PATIENCE_S
        while not (place / "go").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"{place / 'go'} never came")
            time.sleep(0.05)
        return told
