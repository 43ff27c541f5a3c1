"""Whether a channel is enabled, as the firmware sees it: the only read-back there is of FIFO_DISABLE_CHANNELS.

It matters because disabling *nests*: what was disabled twice runs again after the second enable only (enabling an
enabled channel is not counted). Measured on driver 580: 0.2 ms a channel.
"""

from __future__ import annotations

import logging
import struct
import threading

from backend.nvidia import rm

log = logging.getLogger(__name__)

_DEVICE, _SUBDEVICE, _DIAG = 0x5C000001, 0x5C000002, 0x5C000003


class ChannelStates:
    """Asks for channels of any process on one GPU, through a client of our own. For any thread."""

    def __init__(self, system: rm.System, card: rm.Card) -> None:
        self._system = system
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._control: rm.Control | None = None
        self._root = 0
        try:
            # The driver wants the GPU's own file open before it makes a device object.
            self._fds.append(system.open_gpu(card.minor))
            self._fds.append(system.open_control())
            control = rm.Control(system, self._fds[-1])
            root = control.allocate(0, 0, 0, rm.CLASS_ROOT)
            fields = control.query(root, root, rm.GPU_GET_ID_INFO, rm.ID_INFO, card.gpu_id, *[0] * 7)
            device = struct.pack("<I52x", fields[2])  # NV0080_ALLOC_PARAMETERS, 56 bytes: device instance@0
            control.allocate(root, root, _DEVICE, rm.CLASS_DEVICE, device)
            control.allocate(root, _DEVICE, _SUBDEVICE, rm.CLASS_SUBDEVICE, struct.pack("<I", fields[3]))
            control.allocate(root, _SUBDEVICE, _DIAG, rm.CLASS_DIAG)
        except OSError as error:
            log.info("%s: channel states cannot be read back: %s", card.pci, error)
            self.close()
        else:
            self._control, self._root = control, root

    def enabled(self, client: int, channel: int) -> bool | None:
        """Whether `channel` of `client` is enabled; None when that cannot be learnt."""
        with self._lock:
            if self._control is None:
                return None
            try:
                fields = self._control.query(
                    self._root, _DIAG, rm.FIFO_GET_CHANNEL_STATE, rm.CHANNEL_STATE, channel, client, *[0] * 7
                )
            except rm.RmError as error:
                log.debug("state of channel 0x%x of client 0x%x: %s", channel, client, error)
                return None
            return bool(fields[3])

    def close(self) -> None:
        """Gives back what it holds open."""
        with self._lock:
            self._control = None
            for fd in self._fds:
                self._system.close(fd)
            self._fds.clear()
