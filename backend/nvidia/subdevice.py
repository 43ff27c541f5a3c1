"""A client of our own with the device objects of one GPU: the target of controls that need no file of a program."""

from __future__ import annotations

import struct

from backend.nvidia import rm
from backend.nvidia.linux import System

_DEVICE, _SUBDEVICE = 0x5C000001, 0x5C000002

TIMER_GET_TIME = 0x20800403  # ctrl2080timer.h
TIME = struct.Struct("<Q")
"""TIMER_GET_TIME: nanoseconds since 1970 by the GPU's clock; 8 bytes."""


class Subdevice:
    """The open files and objects of the client. Raises OSError where the driver refuses one; nothing is
    left open then.
    """

    HANDLE = _SUBDEVICE
    """Handle of the GPU's subdevice object. Handles above it are free for objects allocated below `root`."""

    def __init__(self, system: System, card: rm.Card) -> None:
        self._system = system
        self._fds: list[int] = []
        try:
            # The driver makes a device object only while the GPU's own file is open.
            self._fds.append(system.open_gpu(card.minor))
            self._fds.append(system.open_control())
            self.control = rm.Control(system, self._fds[-1])
            self.root = self.control.allocate(0, 0, 0, rm.CLASS_ROOT)
            fields = self.control.query(self.root, self.root, rm.GPU_GET_ID_INFO, rm.ID_INFO, card.gpu_id, *[0] * 7)
            device = struct.pack("<I52x", fields[2])  # NV0080_ALLOC_PARAMETERS, 56 bytes: device instance@0
            self.control.allocate(self.root, self.root, _DEVICE, rm.CLASS_DEVICE, device)
            subdevice = struct.pack("<I", fields[3])  # NV2080_ALLOC_PARAMETERS: subdevice instance@0
            self.control.allocate(self.root, _DEVICE, _SUBDEVICE, rm.CLASS_SUBDEVICE, subdevice)
        except BaseException:
            self.close()
            raise

    def time_ns(self) -> int:
        """Return the time of the GPU's own clock, which only a GPU that is there can tell. Raises RmError."""
        return self.control.query(self.root, _SUBDEVICE, TIMER_GET_TIME, TIME, 0)[0]

    def close(self) -> None:
        """Close the files; RM frees the objects with them."""
        for fd in self._fds:
            self._system.close(fd)
        self._fds.clear()
