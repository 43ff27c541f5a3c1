"""The cells of `space_gpu.py`, and the seconds of a GPU that each takes."""

from __future__ import annotations

from collections.abc import Iterator

from tests.experiments.timed.cells import Cell, Tail

COUNT = 8
"""Number of small programs."""
KINDS = ("eighth", "loop", "resnet")
"""What they do: kernels of 8 SMs, a loop of tiny kernels, inference of ResNet-18 with batch 1."""
WAYS = ("slices", "mps")
"""What a spatial slice is compared with: time slicing by the driver, and plain MPS."""
OF_MPS, OF_SLICES = 0.95, 3.0
"""What all of them do in a spatial slice by that under MPS, and by that in time slices, at least."""
TAILS = (Tail(1550, 0.35, False, 2_000, 1.15, 0.0), Tail(1550, 0.35, True, 2_000, 1.15, 0.0))
"""Requests of a program outside, and p99 beside the slice by that alone, at most."""
SHARE, SHARE_NEAR = 0.5, 0.03
"""Part of the time of a program outside of equal weight, and part by which it may be off."""
PERCENTS = (25, 50, 75)
"""Parts of the SMs that a program is given, percent."""
SMS_NEAR = 0.05
"""Part by which a rate may differ from the share of the SMs."""
STREAMS = (1, 16, 60, 256)
"""Streams of a program whose SMs change; Flyt's takes 130 ms below 60 of them, and 180 ms above."""
CHANGES, ACTS_MS = 40, 5.0
"""Number of changes, and milliseconds until each acts, at most."""
OTHERS = 4
"""Number of programs beside a critical one, at most (Flyt, table 6)."""
VARIES = 0.02
"""Part by which the critical one may vary with their number: "less than 2 %" in Flyt."""

WINDOW_S, SETTLE_S = 4.0, 1.0
"""Seconds over which rates of the eight are measured, and before that."""
SHARE_S, SHARES_S = 6.0, 4.0
"""Seconds over which a share is measured, and before that: as long as shares take."""
RATE_S, ACT_S = 1.2, 0.3
"""Seconds over which the rate of one program is measured, and those in which a change acts."""
FULL_S = 1.5
"""Seconds over which the speed of what fills is measured on a GPU of its own."""
PAUSE_S = 0.04
"""Longest pause between two changes, seconds."""
MOUNT_S, START_S, LEAD_S = 7.0, 3.0, 3.0
"""Seconds of a mount with its self-test, of programs until they work, and of one that serves."""
STARTS_S = {"resnet": 14.0}
"""Seconds until eight of a kind work, where they are more."""
SERVER_S = 2.0
"""Seconds of an MPS server of its own."""


def small(kind: str) -> Iterator[Cell]:
    """Yield the cells of one kind of small programs."""
    for way in WAYS:
        yield Cell(kind, f"{way}-{kind}", "rate", SETTLE_S + WINDOW_S)
        if way == "mps" and kind == "eighth":
            yield Cell(kind, f"{way}-{kind}", f"{TAILS[0]}", 2 * TAILS[0].seconds())
    yield Cell(kind, f"space-{kind}", "rate", SETTLE_S + WINDOW_S)
    for tail in TAILS:
        # Of the first kind those alone, too: the same for all kinds.
        yield Cell(kind, f"space-{kind}", f"{tail}", (2 if kind == KINDS[0] else 1) * tail.seconds())
    yield Cell(kind, f"space-{kind}", "share", START_S + SHARES_S + SHARE_S)


def sms() -> Iterator[Cell]:
    """Yield the cells of programs on some SMs."""
    for kind in ("own", "legacy", "thread", "graph"):
        yield Cell("sms", "rates", kind, START_S + (1 + len(PERCENTS)) * (ACT_S + RATE_S))
    for streams in STREAMS:
        yield Cell("sms", "change", f"{streams}", START_S + CHANGES * (PAUSE_S + 0.02))
    yield Cell("sms", "space-sms", "halves", 2 * (START_S + RATE_S + ACT_S))
    yield Cell("sms", "space-sms", "critical", (1 + OTHERS) * (START_S + RATE_S + ACT_S))


CELLS = [one for kind in KINDS for one in small(kind)] + [*sms()]
STARTS = {
    **{f"slices-{kind}": STARTS_S.get(kind, START_S) for kind in KINDS},
    **{f"mps-{kind}": SERVER_S + LEAD_S + STARTS_S.get(kind, START_S) for kind in KINDS},
    **{f"space-{kind}": MOUNT_S + LEAD_S + START_S + FULL_S + STARTS_S.get(kind, START_S) for kind in KINDS},
    **dict.fromkeys(("rates", "change", "space-sms"), MOUNT_S),
}
"""Seconds that a session needs before its first cell."""
