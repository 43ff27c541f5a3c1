"""The module is loaded, used and unloaded a hundred times, and nothing of it is left."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.ledgers import abi
from tests.t5_module.harness import DEVICE, File, Provider, Remote, fresh_name, map_page, there_file, there_join

MODULE = Path(os.environ.get("GGROUP_MODULE", Path(__file__).parents[2] / "kmod/ggroup.ko"))
CYCLES = int(os.environ.get("GGROUP_CYCLES", "100"))
WARM = CYCLES // 4
"""Number of cycles after which everything that is made only once exists."""
SLABS = Path("/sys/kernel/slab")
ACCOUNTED = "kmalloc-cg-"
"""Prefix of caches with few other users, from which the module allocates almost everything."""
PLANS = 10
"""Allocations per cycle of unaccounted objects, since the caches that everything uses are never still."""


def load(path: Path) -> None:
    subprocess.run(["insmod", path], check=True)
    os.chmod(DEVICE, 0o666)


def unload() -> None:
    subprocess.run(["rmmod", "ggroup"], check=True)


def there_use(name: str) -> None:
    there_join(name)
    file = there_file()
    file.charge(100)
    map_page(file.fd)
    os.close(file.usermem())


def use() -> None:
    """Use some of everything that is allocated; most of it is left to the module to free."""
    with Provider(fresh_name()) as gpu, File() as admin:
        tenant = Remote()
        gpu.parent = gpu.add_slice(gpu.root, "/some/slice")
        tenant.do(there_use, gpu.name, provider=gpu)
        events = admin.events(gpu.root)
        for _ in range(PLANS):
            admin.plan(gpu.root, 10)
        admin.press(gpu.parent, 1)
        tenant.end()
        os.close(events)


def objects() -> dict[str, int]:
    """Return the objects in use in each cache that the module allocates from.

    A CPU's own slab counts as full, so all caches are shrunk first, and the files are opened before, since opening
    takes memory, too. The least of several figures is right: by then, objects that wait for an RCU grace period are
    freed.
    """
    counts: dict[str, int] = {}
    for cache in SLABS.glob("kmalloc*"):
        with open(cache / "shrink", "wb", buffering=0) as shrink, open(cache / "objects", "rb", buffering=0) as file:
            for _ in range(8):
                shrink.write(b"1")
                file.seek(0)
                found = int(file.read(64).split()[0])
                counts[cache.name] = min(counts.get(cache.name, found), found)
    return counts


def vmalloced() -> int:
    """Return the bytes in areas of the module."""
    lines = Path("/proc/vmallocinfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ggroup" in line)


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    """The module without its debug information, which is most of it. Afterwards other tests find the module loaded."""
    path = tmp_path / "ggroup.ko"
    subprocess.run(["strip", "--strip-debug", "-o", path, MODULE], check=True)
    yield path
    if not os.path.exists(DEVICE):
        load(path)


@pytest.mark.timeout(900)  # for a busy host, or a kernel that checks everything
def test_load_use_and_unload(module: Path) -> None:
    unload()
    before: dict[str, int] = {}
    for cycle in range(CYCLES):
        if cycle == WARM:
            before = objects()
        load(module)
        use()
        unload()
        assert not os.path.exists(DEVICE)
        assert not re.search(r"^ggroup ", Path("/proc/modules").read_text(), re.MULTILINE)
    cycles = CYCLES - WARM
    grown = {name: count - before.get(name, 0) for name, count in objects().items()}
    # One object lost per cycle adds up to the number of cycles.
    lost = {name: count for name, count in grown.items() if count > cycles * (0.5 if ACCOUNTED in name else PLANS / 2)}
    assert not lost, grown
    assert vmalloced() == 0
    load(module)
    with File() as file:
        assert file.hello().version == abi.ABI_VERSION
