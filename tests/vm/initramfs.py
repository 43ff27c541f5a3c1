"""The initramfs of the virtual machine: one static program, and the modules that a root filesystem needs."""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

WANTED = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
"""Modules, unless they are in the kernel itself: the ports to the host, and the root filesystem."""

UNPACK: Mapping[str, Callable[[bytes], bytes]] = {".ko": bytes, ".xz": lzma.decompress, ".gz": gzip.decompress}
"""Functions that unpack a module file, by its last suffix: Debian 13 packs the modules of its kernels."""


def write(path: Path, modules: Path | None) -> None:
    """Write an initramfs for the kernel whose modules are in the directory `modules` (None: it needs none)."""
    program = path.with_name("init")
    source = Path(__file__).with_name("init.c")
    subprocess.run(["cc", "-static", "-O1", "-Wall", "-Wextra", "-Werror", "-o", program, source], check=True)
    files = {"init": program.read_bytes()}
    if modules is not None:
        needed = closure(modules, WANTED)
        files |= {f"{_module(name)}.ko": _content(modules / name) for name in needed}
        files["modules"] = "".join(f"/{_module(name)}.ko\n" for name in needed).encode()
    device = _entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    members = [_entry("dev", stat.S_IFDIR | 0o755), device]
    members += [_entry(name, stat.S_IFREG | 0o755, content) for name, content in files.items()]
    path.write_bytes(b"".join([*members, _entry("TRAILER!!!", 0)]))


def closure(modules: Path, wanted: Sequence[str]) -> list[str]:
    """Return the files of the wanted modules and of all that they need, in the order of loading (modules.dep(5))."""
    needs = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        name, _, others = line.partition(":")
        needs[name] = others.split()
    files = {_module(name): name for name in needs}
    built_in = {_module(line) for line in (modules / "modules.builtin").read_text().split()}
    order: list[str] = []
    for one in wanted:
        if one in built_in:
            continue
        # Each line names the deepest need last.
        for name in (*reversed(needs[files[one]]), files[one]):
            if name not in order:
                order.append(name)
    return order


def _module(name: str) -> str:
    """Return the name of the module in a file, which may be packed (``9pnet_virtio.ko.xz``)."""
    return os.path.basename(name).partition(".ko")[0].replace("-", "_")


def _content(file: Path) -> bytes:
    """Return the unpacked module of a file."""
    return UNPACK[file.suffix](file.read_bytes())


def _entry(name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    """Return a member of an archive in the "newc" format (Documentation/driver-api/early-userspace/buffer-format)."""
    encoded = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(encoded), 0)
    header = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
    return _padded(header) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
