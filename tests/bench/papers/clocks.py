"""What the GPU did meanwhile: clocks, power, temperature and what slowed it, looked at all the time by a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.bench.core.spread import Spread

EVERY_S = 0.5
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that mean slower than it could be (nvml.h, nvmlClocksEventReason*)."""


@attrs.frozen
class Look:
    """One look at a GPU."""

    sm_mhz: float
    memory_mhz: float
    power_w: float
    celsius: float
    reasons: int
    """Bits."""


def summed(looks: Sequence[Look]) -> dict[str, Any]:
    """Median, least and most of each, and the reasons with the part of looks that had them. Nothing of no look."""
    found: dict[str, Any] = {}
    for name in ("sm_mhz", "memory_mhz", "power_w", "celsius"):
        if looks:
            one = Spread.of([getattr(look, name) for look in looks])
            found[name] = {"median": one.median, "least": one.least, "most": one.most}
    slowed = {word: sum(bool(look.reasons & bit) for look in looks) for bit, word in REASONS.items()}
    found["slowed"] = {word: round(count / len(looks), 4) for word, count in slowed.items() if count}
    found["looks"] = len(looks)
    return found


def looker(gpu: int) -> Callable[[], Look]:
    """What looks at a GPU by NVML."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)

    def look() -> Look:
        return Look(
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )

    return look


@contextlib.contextmanager
def watched(look: Callable[[], Look] | None) -> Iterator[Mapping[str, Any]]:
    """Looks while it is entered; what it yields is filled in at its end. Nothing where there is no GPU to look at."""
    told: dict[str, Any] = {}
    if look is None:
        yield told
        return
    looks, over = [look()], threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            looks.append(look())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        thread.join()
        told |= summed(looks)
