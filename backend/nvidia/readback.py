"""Read back from the firmware whether a channel is enabled: the only check of FIFO_DISABLE_CHANNELS.

It matters because disabling *nests*: a channel that was disabled twice runs again only after the second enable, while
enabling an enabled channel is not counted. Measured on driver 580: 0.2 ms a channel.
"""

from __future__ import annotations

import contextlib
import logging

from backend.nvidia import rm
from backend.nvidia.deadline import Narrow
from backend.nvidia.linux import System
from backend.nvidia.subdevice import Subdevice

log = logging.getLogger(__name__)

_DIAG = Subdevice.HANDLE + 1

WAIT_S = 0.2
"""Longest wait for another thread's question, seconds; usually a question takes 0.2 ms."""


class ChannelStates:
    """The states of channels of any process on one GPU, asked for through a client of our own. For any thread."""

    def __init__(self, system: System, card: rm.Card) -> None:
        self._system = system
        self._card = card
        self._narrow = Narrow(f"the driver, for {card.pci},", WAIT_S)
        self._own: Subdevice | None = None
        self.open()

    def open(self) -> None:
        """Open the client, if it is not open. Where that fails, no state can be learnt."""
        if self._own is not None:
            return
        try:
            own = Subdevice(self._system, self._card)
            try:
                own.control.allocate(own.root, Subdevice.HANDLE, _DIAG, rm.CLASS_DIAG)
            except BaseException:
                own.close()
                raise
            self._own = own
        except OSError as error:
            log.info("%s: channel states cannot be read back: %s", self._card.pci, error)

    def enabled(self, client: int, channel: int) -> bool | None:
        """Return whether `channel` of `client` is enabled; None when that cannot be learnt."""
        try:
            with self._narrow.passed():
                if self._own is None:
                    return None
                fields = self._own.control.query(
                    self._own.root, _DIAG, rm.FIFO_GET_CHANNEL_STATE, rm.CHANNEL_STATE, channel, client, *[0] * 7
                )
                return bool(fields[3])
        except OSError as error:
            log.debug("state of channel 0x%x of client 0x%x: %s", channel, client, error)
            return None

    def close(self) -> None:
        """Close the client, unless a call that uses it hangs in the driver."""
        with contextlib.suppress(OSError), self._narrow.passed():
            if self._own is not None:
                self._own.close()
            self._own = None
