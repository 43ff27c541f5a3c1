"""Level 3: temperature and power of GPUs in the metrics, with a double of NVML."""

from __future__ import annotations

import importlib
import inspect
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from ggroupfs.view import sensors
from ggroupfs.view.sensors import SensorCollector

NOT_SUPPORTED, UNKNOWN_UUID, NO_DRIVER = 3, 6, 9


class NvmlError(Exception):
    """NVMLError of pynvml."""


@attrs.define(eq=False)
class Nvml:
    """Double of pynvml with the GPUs GPU-0 and GPU-1; the second reports no power."""

    broken: bool = False
    opened: int = 0
    hang: threading.Event | None = None
    NVMLError = NvmlError

    def nvmlInit(self) -> None:
        self.opened += 1
        if self.broken:
            raise NvmlError(NO_DRIVER)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if self.hang is not None:
            self.hang.wait()
        if uuid not in ("GPU-0", "GPU-1"):
            raise NvmlError(UNKNOWN_UUID)
        return uuid

    def nvmlDeviceGetTemperature(self, device: str, sensor: int) -> int:
        assert sensor == 0
        return {"GPU-0": 41, "GPU-1": 63}[device]

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        if device == "GPU-1":
            raise NvmlError(NOT_SUPPORTED)
        return 312_500


def test_the_double_is_like_pynvml() -> None:
    """Every function that is called exists in pynvml, and the sensor is that of the die."""
    module = importlib.import_module("pynvml")
    for name in (name for name in vars(Nvml) if name.startswith("nvml")):
        real = inspect.signature(getattr(module, name)).parameters
        assert len(real) == len(inspect.signature(getattr(Nvml, name)).parameters) - 1, name
    assert module.NVML_TEMPERATURE_GPU == sensors.TEMPERATURE_GPU
    assert issubclass(module.NVMLError, Exception)


def planted(place: Path, gpu: str = "nvidia") -> Path:
    """Plant a tree of plain files with three GPUs, the last of which is lost."""
    place.joinpath("ggroup.backend").write_text(f"gpu {gpu}\n")
    for index in range(3):
        (place / "gpus" / str(index)).mkdir(parents=True)
        (place / "gpus" / str(index) / "uuid").write_text(f"GPU-{index}\n")
    return place


def told(collector: SensorCollector) -> dict[tuple[str, Any, Any], float]:
    """Return every sample by its name, GPU and UUID."""
    return {
        (sample.name, sample.labels["gpu"], sample.labels["uuid"]): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


EVERYTHING = {
    ("ggroup_gpu_temperature_celsius", "0", "GPU-0"): 41,
    ("ggroup_gpu_temperature_celsius", "1", "GPU-1"): 63,
    ("ggroup_gpu_power_watts", "0", "GPU-0"): 312.5,
}


def test_what_the_sensors_say(tmp_path: Path) -> None:
    """Figures that a GPU does not report are left out, and NVML is opened once."""
    nvml = Nvml()
    collector = SensorCollector(planted(tmp_path), nvml)
    assert told(collector) == EVERYTHING
    assert told(collector) == EVERYTHING
    assert nvml.opened == 1


def test_a_software_gpu_has_none(tmp_path: Path) -> None:
    nvml = Nvml()
    assert told(SensorCollector(planted(tmp_path, "soft"), nvml)) == {}
    assert nvml.opened == 0


def test_no_tree(tmp_path: Path) -> None:
    assert told(SensorCollector(tmp_path, Nvml())) == {}


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, though not with every scrape."""
    nvml = Nvml(broken=True)
    collector = SensorCollector(planted(tmp_path), nvml)
    assert [told(collector), told(collector)] == [{}, {}]
    assert nvml.opened == 1
    nvml.broken = False
    monkeypatch.setattr(collector, "_next", time.monotonic())
    assert told(collector) == EVERYTHING


def test_a_driver_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape waits only briefly, no second thread follows the first, and a driver that recovers is read again."""
    monkeypatch.setattr(sensors, "ANSWER_S", 0.2)
    nvml = Nvml(hang=threading.Event())
    assert nvml.hang is not None
    collector = SensorCollector(planted(tmp_path), nvml)
    assert told(collector) == {}
    threads = threading.active_count()
    assert told(collector) == {}
    assert threading.active_count() == threads
    nvml.hang.set()
    deadline = time.monotonic() + 60
    while not (found := told(collector)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == EVERYTHING
