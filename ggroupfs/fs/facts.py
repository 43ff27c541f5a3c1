"""The read-only files: the backend that serves the mount, its capabilities, and the GPUs. Tables, as in controls.py."""

from __future__ import annotations

from collections.abc import Callable

from backend.core.controller import Controller
from backend.core.records import Capability, Channel, GpuInfo
from backend.process.identity import ROOT, Group, SliceOn
from ggroupfs.fs.controls import LEVERS, Control
from ggroupfs.fs.made import SLICES
from ggroupfs.text import values


def _backend(controller: Controller, _: Group) -> str:
    return values.flat_keyed(dict(controller.facts))


def _capabilities(controller: Controller, _: Group) -> str:
    table = controller.capabilities()
    return values.flat_keyed({name: table.get(name, Capability.UNSUPPORTED).value for name in LEVERS})


def _gpu(name: str, render: Callable[[GpuInfo], object]) -> Control:
    return Control(name, 0o444, lambda controller, group: f"{render(controller.gpus[group.gpu].info)}\n")


ROOT_FACTS = (
    Control("ggroup.backend", 0o444, _backend),
    Control("ggroup.capabilities", 0o444, _capabilities),
    SLICES,
)


def _gpu_events(controller: Controller, group: Group) -> str:
    return values.flat_keyed(
        {"present": int(not controller.gpus[group.gpu].lost), "lost": controller.losses(SliceOn(ROOT, group.gpu))}
    )


GPU_FACTS = (
    _gpu("uuid", lambda info: info.uuid),
    _gpu("name", lambda info: info.name),
    _gpu("pci", lambda info: info.pci),
    _gpu("gmem.capacity", lambda info: info.capacity),
    Control("gmem.current", 0o444, lambda controller, group: f"{controller.gpu_current(group.gpu)}\n"),
    Control("gpu.events", 0o444, _gpu_events, channel=Channel.GPU),
)
