"""The initramfs of the virtual machine's kernel, with compressed and uncompressed modules."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm import initramfs


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress)])
def test_packed_modules_are_unpacked_and_in_order(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Debian 12 and 13: each module after those that it needs, by the name under which it is loaded."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("virtio", "9pnet", "9pnet-virtio"):
        (modules / f"{name}.ko{suffix}").write_bytes(pack(f"module {name}".encode()))
    ending = f".ko{suffix}"
    (modules / "modules.dep").write_text(
        f"virtio{ending}:\n9pnet{ending}:\n9pnet-virtio{ending}: 9pnet{ending} virtio{ending}\n"
    )
    (modules / "modules.builtin").write_text("kernel/fs/overlay.ko\n")
    monkeypatch.setattr(initramfs, "WANTED", ("9pnet_virtio", "overlay"))
    initramfs.write(tmp_path / "initramfs", modules)
    made = (tmp_path / "initramfs").read_bytes()
    assert b"/virtio.ko\n/9pnet.ko\n/9pnet_virtio.ko\n" in made
    for name in ("virtio", "9pnet", "9pnet-virtio"):
        assert f"module {name}".encode() in made
