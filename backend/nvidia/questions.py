"""Choose the channel of a frozen process that is asked about next: is it still off the runlist?"""

from __future__ import annotations

import random
from collections.abc import Iterable

from backend.nvidia.applied import Applied, channels_of
from backend.nvidia.discover import Engine, Tsg
from backend.nvidia.levers import Key
from backend.nvidia.readback import ChannelStates


class Questions:
    """The channels to ask about, in an order that the process cannot know. For any thread."""

    def __init__(self, applied: Applied, states: ChannelStates) -> None:
        """`states` tells which channels of the GPU are on its runlist."""
        self._applied = applied
        self._states = states
        self._left: list[Key] = []  # not yet asked about in this round, the next one last
        self.suspect = 0
        """Questions to ask before those to other processes, since this one had the engine while it was frozen."""

    def suspected(self) -> None:
        """Put channels that run kernels first: the process had the engine, perhaps while it was frozen."""
        if not self.suspect:
            self._left = [key for tsg in self._applied.tsgs() if _runs_kernels(tsg) for key in channels_of(tsg)]
            random.shuffle(self._left)
            self.suspect = len(self._left)

    def is_thawed(self) -> bool:
        """Ask about one channel that is to be off the runlist, another one each time; return whether it is on.
        Takes no lock: a thread that acts may hang, and may have changed the state meanwhile.
        """
        self.suspect = max(0, self.suspect - 1)
        key = self._next()
        return key is not None and self._is_undone(key)

    def finds_undone(self) -> bool:
        """As :meth:`is_thawed`, just before all channels are taken off again: if the channel is on, a
        new round begins.
        """
        key = self._next()
        if key is None or not self._is_undone(key):
            return False
        self._left.clear()
        return True

    def _next(self) -> Key | None:
        """Return the next channel of the round. The first channel of each TSG comes first, TSGs that run kernels
        before the others; which channel of a TSG it is, is random.
        """
        if not self._left:
            lists = [channels_of(tsg) for tsg in _kernels_first(self._applied.tsgs()) if self._applied.takes(tsg)]
            for keys in lists:
                random.shuffle(keys)
            rounds = [keys[n] for n in range(max(map(len, lists), default=0)) for keys in lists if n < len(keys)]
            self._left = rounds[::-1]
        return self._left.pop() if self._left else None

    def _is_undone(self, key: Key) -> bool:
        """Return whether a channel is on the runlist although it has to be off."""
        undone = key in self._applied.off and self._states.enabled(*key) is True and self._applied.takes_channel(key)
        if undone:
            self._left.append(key)  # to be asked about again before anything is done
        return undone


def _runs_kernels(tsg: Tsg) -> bool:
    return tsg.engine is not Engine.COPY


def _kernels_first(tsgs: Iterable[Tsg]) -> list[Tsg]:
    return sorted(tsgs, key=lambda tsg: tsg.engine is Engine.COPY)
