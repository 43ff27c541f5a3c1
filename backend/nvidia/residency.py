"""Whose context was on the engine of a GPU, and for how long: what a trace of its context switches adds up to.

Every instant is charged to one process at most, so what all of them used never exceeds the time that passed. The switch
to a context is charged to whom it is for: two programs that take turns use all of the time between them, and not the
96 % that their stays are (a switch of 197 us of which 81 lie between two stays, measured on an H200).

A context stays on the engine until another one is due. So this is the time that others had to wait for, which is what
is to be shared, and not how busy the GPU was: a program that idles by itself uses all of it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping

import attrs

SWITCH_MOST_NS = 1_000_000
"""The longest time between two stays that is taken for a switch, and not for an engine that has no context."""

PRUNE = 1024
"""Pids that may be known before those of the dead are forgotten: one that nobody asked for stays until then."""


class Edge(enum.Enum):
    """What happened to a context."""

    ON = "on"
    """It is on the engine from now on."""
    OFF = "off"
    """It was saved."""


@attrs.frozen
class Switch:
    """One record of a trace."""

    edge: Edge
    """What happened."""
    pid: int
    """Of the process whose context it is."""
    ns: int
    """When, by the clock of the GPU."""


class Residency:
    """Nanoseconds on the engine by pid, from the moment `now_ns` on."""

    def __init__(self, now_ns: int) -> None:
        self._used: dict[int, int] = {}
        self._stays: dict[int, int] = {}
        self._charged = now_ns  # everything before this is
        self._on: int | None = None  # whose context is on the engine
        self._begun = False  # with this one there was a switch
        self._blind = False  # nothing is known until the next switch

    def note(self, switch: Switch) -> None:
        """What the trace says, in its order."""
        if self._blind:
            self._blind, self._charged = False, max(self._charged, switch.ns)
        if switch.edge is Edge.ON:
            if self._on is not None:
                self._charge(self._on, switch.ns)  # the record of its end was lost
            elif switch.ns - self._charged <= SWITCH_MOST_NS and self._begun:
                self._charge(switch.pid, switch.ns)
            else:
                self._charged = max(self._charged, switch.ns)
            self._on = switch.pid
            self._stays[switch.pid] = self._stays.get(switch.pid, 0) + 1
        else:
            if self._on is not None or not self._begun:  # or it was there before we were
                self._charge(switch.pid if self._on is None else self._on, switch.ns)
            self._on = None
        self._begun = True

    def advance(self, ns: int) -> None:
        """There are no more records up to `ns`: who is on the engine has been until then."""
        if self._on is not None:
            self._charge(self._on, ns)

    def lose(self, ns: int | None = None) -> None:
        """What happened up to `ns`, or up to the next switch, is not known: it is nobody's."""
        self._on, self._begun, self._blind = None, False, ns is None
        if ns is not None:
            self._charged = max(self._charged, ns)

    def restart(self, ns: int) -> None:
        """The clock was set, and says `ns` now: what was from the last charge until then is nobody's."""
        self.lose(ns)
        self._charged = ns

    def usec(self, pid: int) -> int:
        """Microseconds that a process used; it only grows."""
        return self._used.get(pid, 0) // 1000

    def stays(self, pid: int) -> int:
        """How often a process came onto the engine."""
        return self._stays.get(pid, 0)

    def used(self) -> Mapping[int, int]:
        """Microseconds of all, by pid."""
        return {pid: ns // 1000 for pid, ns in self._used.items()}

    def drop(self, pid: int) -> None:
        """The process is gone: who has its pid next begins at 0."""
        self._used.pop(pid, None)
        self._stays.pop(pid, None)

    def prune(self, lives: Callable[[int], bool]) -> None:
        """Drops those that are gone, once there are many."""
        if len(self._used) > PRUNE:
            self._used = {pid: ns for pid, ns in self._used.items() if lives(pid)}
            self._stays = {pid: count for pid, count in self._stays.items() if pid in self._used}

    def _charge(self, pid: int, ns: int) -> None:
        if ns > self._charged:
            self._used[pid] = self._used.get(pid, 0) + ns - self._charged
            self._charged = ns


class Backlog:
    """What a trace said, and is charged only once it is due: so a figure says how things were at a time that the asker
    knows, and not whenever somebody last read the trace. Two threads: one notes, the other settles."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._known = 0

    def note(self, switch: Switch) -> None:
        """As Residency has it, once it is due."""
        self._waiting.append((switch.ns, lambda: self._residency.note(switch)))

    def lose(self, ns: int | None = None) -> None:
        """As Residency has it, and due with what was noted last."""
        last = self._waiting[-1][0] if self._waiting else self._known
        self._waiting.append((last, lambda: self._residency.lose(ns)))

    def know(self, ns: int) -> None:
        """All that happened up to `ns` was noted."""
        self._known = max(self._known, ns)

    def account(self, ns: int) -> None:
        """Charges what happened up to `ns`, as far as that is known."""
        ns = min(ns, self._known)
        while self._waiting and self._waiting[0][0] <= ns:
            self._waiting.popleft()[1]()
        self._residency.advance(ns)
