"""What the GPU did meanwhile: clocks, power, temperature and what slowed it, looked at all the time by a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.bench.core.spread import Spread

EVERY_S, JOIN_S = 0.5, 5.0
"""Seconds between two looks; and for the last one to return, which a GPU that is lost may never let it."""
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that mean slower than it could be (nvml.h, nvmlClocksEventReason*)."""


NAMES = ("sm_mhz", "memory_mhz", "power_w", "celsius", "held_gib")
"""What is told of looks, by its fields."""


@attrs.frozen
class Look:
    """One look at a GPU."""

    sm_mhz: float
    memory_mhz: float
    power_w: float
    celsius: float
    reasons: int
    """Bits."""
    held_gib: float = 0.0
    """Memory that all programs hold."""


def summed(looks: Sequence[Look]) -> dict[str, Any]:
    """Median, least and most of each, and the reasons with the part of looks that had them. Nothing of no look."""
    found: dict[str, Any] = {}
    for name in NAMES:
        if looks:
            one = Spread.of([getattr(look, name) for look in looks])
            found[name] = {"median": one.median, "least": one.least, "most": one.most}
    slowed = {word: sum(bool(look.reasons & bit) for look in looks) for bit, word in REASONS.items()}
    found["slowed"] = {word: round(count / len(looks), 4) for word, count in slowed.items() if count}
    found["looks"] = len(looks)
    return found


def looker(gpu: int) -> Callable[[], Look | None]:
    """What looks at a GPU by NVML; it returns None where the GPU does not say one of those, or is lost."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    reasons = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = reasons or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons

    def look() -> Look | None:
        try:
            return Look(
                pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
                pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                reasons(handle),
                pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30,
            )
        except pynvml.NVMLError:
            return None

    return look


@contextlib.contextmanager
def watched(looks: Sequence[Callable[[], Look | None]]) -> Iterator[Mapping[str, Any]]:
    """Looks at GPUs while it is entered; what it yields is filled in at its end: the first one's as of `summed`, and
    those of the others below `others`. Nothing where there is no GPU to look at."""
    told: dict[str, Any] = {}
    if not looks:
        yield told
        return
    seen: list[list[Look]] = [[] for _ in looks]
    over = threading.Event()

    def watch() -> None:
        while True:
            for mine, look in zip(seen, looks, strict=True):
                if (one := look()) is not None:
                    mine.append(one)
            if over.wait(EVERY_S):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        thread.join(JOIN_S)
        told |= summed(seen[0])
        if others := seen[1:]:
            told["others"] = [summed(one) for one in others]
