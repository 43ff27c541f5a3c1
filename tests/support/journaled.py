"""Journals: their settings in tests, histories of calls that are noted, and lines with valid checksums."""

from __future__ import annotations

import copy
import os
import zlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from backend.core.entries import Life
from backend.core.reasons import FROZEN, Off, Reason
from backend.ledgers.journal import format, state
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.state import Lever, Moving, Owned, State
from backend.process.identity import ROOT, Process, Slice

BOOT = "this-boot"

MEMORY = "/dev/shm"
"""A tmpfs, as /run is, since every change is synced."""

quick = settings(max_examples=150, suppress_health_check=list(HealthCheck))


def let_go(journal: Journal) -> None:
    """Close a journal as the death of its daemon does."""
    os.close(journal._fd)
    os.close(journal._folder)


uuids = st.sampled_from(("GPU-a", "GPU-b"))
nodes = st.sampled_from((Slice("/a"), Slice("/a/b"), Slice("/c\udcff\n"), Process(5, 7), Process(6, 1)))
figures = st.dictionaries(
    st.sampled_from(("high", "priority", "frozen", "peak", "events_oom", "uid")), st.integers(0, 1)
)

lives = st.none() | st.builds(Life, st.integers(0, 9), st.integers(0, 3), st.none() | st.integers(1, 9))

names = st.sampled_from(("", "compute.freeze", "gmem.limit.high"))


@st.composite
def histories(draw: st.DrawFn) -> list[list[state.Operation]]:
    """Draw lines of operations, each valid at its place."""
    now, lines = State(), []
    for _ in range(draw(st.integers(1, 12))):
        line = []
        for _ in range(draw(st.integers(1, 3))):
            key = draw(uuids), draw(nodes)
            one: state.Operation = draw(
                st.sampled_from(
                    (
                        state.gpu(key[0]),
                        state.add(key, ROOT),
                        state.add(key, Slice("/a")),
                        state.move(key, Slice("/a")),
                        state.remove(key),
                        state.put(key, draw(figures)),
                        state.lever((key[0], Process(5, 7)), Lever(draw(st.booleans()), 10, draw(st.booleans()))),
                        state.live(Slice("/a/b"), draw(lives)),
                        state.lever((key[0], Process(5, 7)), Lever(gr=draw(st.booleans()))),
                        state.reasons(
                            (key[0], Process(5, 7)), draw(st.sampled_from((Off(), FROZEN, Off(gr=Reason.TURN))))
                        ),
                        state.own((key[0], Process(5, 7)), draw(st.sampled_from(({}, {"c1d00019:5c000003": 777})))),
                        state.moving(Process(5, 7), Moving("GPU-a", "GPU-b", draw(st.none() | figures))),
                        state.moved(Process(5, 7)),
                        state.give(draw(st.sampled_from((key, key[1], "root"))), draw(names), Owned(1, None, 0o600)),
                        state.forget(key),
                    )
                )
            )
            attempt = copy.deepcopy(now)
            try:
                attempt.apply(one)
            except state.Nonsense:
                continue
            now = attempt
            line.append(one)
        lines.append(line)
    return lines


def signed(bodies: list[bytes]) -> bytes:
    """Return lines with valid checksums around arbitrary bodies."""
    words = format.MAGIC + b"1 " + BOOT.encode()
    checksum = zlib.crc32(words)
    data = words + b" %08x\n" % checksum
    for body in bodies:
        checksum = zlib.crc32(body, checksum)
        data += b"%08x %b\n" % (checksum, body)
    return data
