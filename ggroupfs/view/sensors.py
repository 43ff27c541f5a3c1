"""Exports the temperature and power of a tree's GPUs as Prometheus metrics, from NVML, which is opened once.

The tree does not contain these figures, so the driver is asked. Every NVML session that begins or ends makes all other
programs wait in the driver (docs/nvidia.md), so this is for an exporter that keeps running. A call can hang in the
driver; its thread is then abandoned, and no metrics are given until the call returns. A software GPU has no sensors.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import attrs
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend.door.client import facts_of
from ggroupfs.client import content, numbers

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Seconds that the driver has to answer a scrape; the first call after it was loaded takes one."""
RETRY_S = 60.0
"""Seconds between two attempts to open NVML."""
TEMPERATURE = "ggroup_gpu_temperature_celsius"
"""Name of the metric."""
POWER = "ggroup_gpu_power_watts"
"""Name of the metric."""
TEMPERATURE_GPU = 0
"""NVML_TEMPERATURE_GPU of nvml.h: the sensor on the die."""


@attrs.frozen
class Reading:
    """The sensor readings of one GPU; None for a missing sensor."""

    gpu: int
    """Index in the tree."""
    uuid: str
    """Stable name of the GPU."""
    celsius: float | None
    """Temperature of the die, degrees Celsius (nvmlDeviceGetTemperature)."""
    watts: float | None
    """Power draw, watts (nvmlDeviceGetPowerUsage)."""


class SensorCollector(Collector):
    """Reads NVML for each scrape, one scrape at a time. `nvml` replaces pynvml in tests."""

    def __init__(self, mount: Path, nvml: Any = None) -> None:
        self._mount, self._module = mount, nvml
        self._nvml: Any = None
        self._next = 0.0  # time.monotonic() of the next attempt to open it
        self._turn = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are available: none without NVML, and none while the driver hangs."""
        names = ("gpu", "uuid")
        temperature = GaugeMetricFamily(TEMPERATURE, "Temperature of the GPU (NVML).", labels=names)
        power = GaugeMetricFamily(POWER, "Power that the GPU draws (NVML).", labels=names)
        for reading in self._readings():
            labels = (str(reading.gpu), reading.uuid)
            if reading.celsius is not None:
                temperature.add_metric(labels, reading.celsius)
            if reading.watts is not None:
                power.add_metric(labels, reading.watts)
        yield from (metric for metric in (temperature, power) if metric.samples)

    def _readings(self) -> Sequence[Reading]:
        if not self._turn.acquire(blocking=False):  # another scrape, or an abandoned one
            return ()
        answer: Future[Sequence[Reading]] = Future()

        def work() -> None:
            try:
                answer.set_result(self._read())
            except Exception:
                log.exception("the sensors of GPUs: not read")
                answer.set_result(())
            finally:
                self._turn.release()

        threading.Thread(target=work, name="ggroupfs-sensors", daemon=True).start()
        return answer.result() if wait([answer], ANSWER_S).done else ()

    def _read(self) -> Sequence[Reading]:
        try:
            if facts_of(self._mount).get("gpu") != "nvidia":
                return ()
            uuids = {gpu: content(self._mount / "gpus" / str(gpu) / "uuid") for gpu in numbers(self._mount / "gpus")}
        except OSError:  # no tree answers, which `ggroup_up` reports
            return ()
        if not self._opened():
            return ()
        found = []
        for gpu, uuid in uuids.items():
            device = self._asked(self._nvml.nvmlDeviceGetHandleByUUID, uuid)
            if device is not None:
                celsius = self._asked(self._nvml.nvmlDeviceGetTemperature, device, TEMPERATURE_GPU)
                milliwatts = self._asked(self._nvml.nvmlDeviceGetPowerUsage, device)
                found.append(Reading(gpu, uuid, celsius, None if milliwatts is None else milliwatts / 1000))
        if uuids and all(one.celsius is None and one.watts is None for one in found):
            self._close()  # the driver may have been reloaded, which an open library does not notice
        return found

    def _close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
        self._nvml = None

    def _opened(self) -> bool:
        """Return whether NVML is open. If not, try to open it, at most once every RETRY_S."""
        if self._nvml is None and time.monotonic() >= self._next:
            self._next = time.monotonic() + RETRY_S
            module = self._module or importlib.import_module("pynvml")
            try:
                module.nvmlInit()
            except module.NVMLError:  # no driver, or no device that this user may open
                return False
            self._nvml = module
        return self._nvml is not None

    def _asked(self, call: Callable[..., Any], *words: object) -> Any:
        """Return the result of an NVML call; None if this GPU does not support it, or is lost."""
        try:
            return call(*words)
        except self._nvml.NVMLError:
            return None
