"""Temperature and power of the GPUs of a tree, as Prometheus metrics: by NVML, which is opened once and stays open.

The tree does not tell them, so the driver is asked. Each NVML that begins or ends has all other programs wait in the
driver (docs/nvidia.md), so this is for an exporter that stays. A call can hang in the driver: it is left behind in its
thread, and nothing is told until it comes back. A software GPU has no sensors.
"""

from __future__ import annotations

import importlib
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

ANSWER_S = 2.0
"""Seconds that the driver has to answer a scrape; the first call after it was loaded takes one."""
RETRY_S = 60.0
"""Seconds between two tries to open NVML where there is none."""
TEMPERATURE = "ggroup_gpu_temperature_celsius"
"""Name of the metric."""
POWER = "ggroup_gpu_power_watts"
"""Name of the metric."""
TEMPERATURE_GPU = 0
"""NVML_TEMPERATURE_GPU of nvml.h: the sensor on the die."""


@attrs.frozen
class Reading:
    """What the sensors of one GPU say; None for one that is not there."""

    gpu: int
    """Index in the tree."""
    uuid: str
    """Its stable name."""
    celsius: float | None
    """Temperature of the die, degrees Celsius (nvmlDeviceGetTemperature)."""
    watts: float | None
    """Power that it draws, watts (nvmlDeviceGetPowerUsage)."""


class SensorCollector(Collector):
    """Asks NVML for each scrape, one at a time. `nvml` is what stands in for pynvml."""

    def __init__(self, mount: Path, nvml: Any = None) -> None:
        self._mount, self._module = mount, nvml
        self._nvml: Any = None
        self._next = 0.0  # time.monotonic() of the next try to open it
        self._turn = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """The metrics that there are: none without NVML, and none while the driver hangs."""
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
        if not self._turn.acquire(blocking=False):  # another scrape, or one that is left behind
            return ()
        answer: Future[Sequence[Reading]] = Future()

        def work() -> None:
            try:
                answer.set_result(self._read())
            except BaseException as error:
                answer.set_exception(error)
            finally:
                self._turn.release()

        threading.Thread(target=work, name="ggroupfs-sensors", daemon=True).start()
        return answer.result() if wait([answer], ANSWER_S).done else ()

    def _read(self) -> Sequence[Reading]:
        try:
            if facts_of(self._mount).get("gpu") != "nvidia":
                return ()
            uuids = {gpu: content(self._mount / "gpus" / str(gpu) / "uuid") for gpu in numbers(self._mount / "gpus")}
        except OSError:  # no tree answers: `ggroup_up` says so
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
        return found

    def _opened(self) -> bool:
        """Whether NVML is open: it is tried now and then."""
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
        """What NVML answers; None for what this GPU does not tell, or while it is lost."""
        try:
            return call(*words)
        except self._nvml.NVMLError:
            return None
