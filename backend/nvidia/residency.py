"""Time on the engine of a GPU by process, added up from a trace of its context switches.

Every instant is charged to at most one process, so the sum never exceeds the time that passed. The switch to a
context is charged to the process of that context: two programs that take turns use all of the time between them, and
not just the 96 % of their stays (a switch takes 197 us, of which 81 lie between two stays, measured on an H200).

A context stays on the engine until another one is due. So this is the time that others had to wait for, which is what
has to be shared. It is not how busy the GPU was: a program that idles alone uses all of the time.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping

import attrs

SWITCH_MOST_NS = 1_000_000
"""Longest time between two stays that counts as a switch, nanoseconds; after a longer one the engine
had no context.
"""

PRUNE = 1024
"""Number of known pids from which on dead ones are dropped; before that, a pid that was never asked for stays."""


class Edge(enum.Enum):
    """A change of state of a context."""

    ON = "on"
    """The context is on the engine from now on."""
    OFF = "off"
    """The context was saved."""


@attrs.frozen
class Switch:
    """One record of the trace."""

    edge: Edge
    """The change."""
    pid: int
    """Pid of the process whose context it is."""
    ns: int
    """Time of the change in nanoseconds, by the clock of the GPU."""


class Residency:
    """Nanoseconds on the engine by pid, from `now_ns` on."""

    def __init__(self, now_ns: int) -> None:
        self._used: dict[int, int] = {}
        self._stays: dict[int, int] = {}
        self._charged = now_ns  # all time before this is charged
        self._on: int | None = None  # pid of the context that is on the engine
        self._begun = False  # whether there was a switch since the last gap
        self._blind = False  # whether nothing is known until the next switch

    def note(self, switch: Switch) -> None:
        """Account for the next record of the trace."""
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
            if self._on is not None or not self._begun:  # or it was on the engine before the trace began
                self._charge(switch.pid if self._on is None else self._on, switch.ns)
            self._on = None
        self._begun = True

    def advance(self, ns: int) -> None:
        """Charge the process on the engine up to `ns`: the trace has no more records until then."""
        if self._on is not None:
            self._charge(self._on, ns)

    def lose(self, ns: int | None = None) -> None:
        """Charge the time up to `ns`, or up to the next switch, to no process: the trace has a gap."""
        self._on, self._begun, self._blind = None, False, ns is None
        if ns is not None:
            self._charged = max(self._charged, ns)

    def restart(self, ns: int) -> None:
        """Start over at `ns` after the clock was set. The time since the last charge is charged to no process."""
        self.lose(ns)
        self._charged = ns

    def usec(self, pid: int) -> int:
        """Return the microseconds that a process used; the figure only grows."""
        return self._used.get(pid, 0) // 1000

    def stays(self, pid: int) -> int:
        """Return how often a process came onto the engine."""
        return self._stays.get(pid, 0)

    def used(self) -> Mapping[int, int]:
        """Return the microseconds that each process used, by pid."""
        return {pid: ns // 1000 for pid, ns in self._used.items()}

    def drop(self, pid: int) -> None:
        """Drop a process that is gone: the next one with its pid begins at 0."""
        self._used.pop(pid, None)
        self._stays.pop(pid, None)

    def prune(self, lives: Callable[[int], bool]) -> None:
        """Drop dead processes once there are more than PRUNE."""
        if len(self._used) > PRUNE:
            self._used = {pid: ns for pid, ns in self._used.items() if lives(pid)}
            self._stays = {pid: count for pid, count in self._stays.items() if pid in self._used}

    def _charge(self, pid: int, ns: int) -> None:
        if ns > self._charged:
            self._used[pid] = self._used.get(pid, 0) + ns - self._charged
            self._charged = ns


class Backlog:
    """Records of a trace that are charged only once they are due, so that a figure is of a moment that its reader
    knows, whenever the trace was last read. For two threads: one notes records, the other accounts for them.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._known = 0

    def note(self, switch: Switch) -> None:
        """Queue :meth:`Residency.note` until the record is due."""
        self._waiting.append((switch.ns, lambda: self._residency.note(switch)))

    def lose(self, ns: int | None = None) -> None:
        """Queue :meth:`Residency.lose`, due together with the last record."""
        last = self._waiting[-1][0] if self._waiting else self._known
        self._waiting.append((last, lambda: self._residency.lose(ns)))

    def know(self, ns: int) -> None:
        """Note that all records up to `ns` are here."""
        self._known = max(self._known, ns)

    def account(self, ns: int) -> None:
        """Charge what happened up to `ns`, as far as it is known."""
        ns = min(ns, self._known)
        while self._waiting and self._waiting[0][0] <= ns:
            self._waiting.popleft()[1]()
        self._residency.advance(ns)
