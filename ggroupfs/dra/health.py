"""The health of GPUs, from ``gpu.events``: whether each is present, and the time of the last look."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from ggroupfs.dra.devices import Device, found

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks without an event, which find a GPU that was added or a tree that is mounted again."""
AGAIN_S = 0.2
"""Seconds before the next look if the files of a dead daemon would wake the thread endlessly."""


@attrs.frozen
class Health:
    """The health of one device, in the terms of DRAResourceHealth."""

    name: str
    """Name of the device."""
    health: str
    """``HEALTHY``, ``UNHEALTHY``, or ``UNKNOWN`` while no tree is mounted."""
    message: str
    """Reason, if the device is not healthy."""
    at: float
    """Time of the last look, seconds since the epoch."""


class Watcher:
    """The GPUs of a tree, followed by a thread that waits for their events."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._changed = threading.Condition()
        self._version = 0
        self._devices: Mapping[str, Device] = {}
        self._mounted = False
        self._at = time.time()
        self._end_read, self._end_write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        os.close(self._end_write)
        self._thread.join()
        os.close(self._end_read)
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def devices(self) -> Sequence[Device] | None:
        """Return the GPUs as last seen; None while no tree is mounted."""
        with self._changed:
            return list(self._devices.values()) if self._mounted else None

    def wait(self, seen: int, seconds: float) -> tuple[int, Sequence[Health]]:
        """Return the version and the health of all devices once it differs from version `seen`, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != seen, seconds)
            return self._version, [self._health(device) for device in self._devices.values()]

    def _health(self, device: Device) -> Health:
        if not self._mounted:
            return Health(device.name, "UNKNOWN", f"no tree is mounted on {self._tree}", self._at)
        if not device.present:
            return Health(device.name, "UNHEALTHY", "the GPU is lost: gpu.events says present 0", self._at)
        return Health(device.name, "HEALTHY", "", self._at)

    def look(self) -> None:
        """Look at the tree once."""
        try:
            devices = {device.name: device for device in found(self._tree)}
            mounted = True
        except (OSError, ValueError, KeyError) as error:
            devices, mounted = dict(self._devices), False
            if self._mounted:
                log.warning("the tree on %s: %s", self._tree, error)
        with self._changed:
            self._at = time.time()
            if (devices, mounted) != (self._devices, self._mounted):
                self._devices, self._mounted = devices, mounted
                self._version += 1
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with contextlib.ExitStack() as files:
                poll = select.poll()
                poll.register(self._end_read, select.POLLIN | select.POLLHUP)
                # Opened before the look, so that an event in between wakes the poll.
                for name in _events(self._tree):
                    with contextlib.suppress(OSError):
                        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
                        files.callback(os.close, file)
                        os.pread(file, 256, 0)
                        poll.register(file, select.POLLPRI)
                self.look()
                woken = poll.poll(LOOK_S * 1000)
            if any(file == self._end_read for file, _ in woken):
                return
            if any(events & (select.POLLERR | select.POLLHUP) for _, events in woken):
                time.sleep(AGAIN_S)


def _events(tree: Path) -> Sequence[str]:
    with contextlib.suppress(OSError):
        return [os.fspath(tree / "gpus" / name / "gpu.events") for name in os.listdir(tree / "gpus") if name.isdigit()]
    return []
