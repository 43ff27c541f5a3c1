"""`ggroupfs account` on a mounted tree: it agrees with what ran, across kill -9 and an upgrade, in all formats."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ggroupfs.text.names import slice_directory
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import complaint, ok
from tests.support.mounted import Mounted, Tenant, daemons, eventually, kill, mountpoint

MIB = 1 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    """A mountpoint with nothing on it."""
    with mountpoint() as path:
        yield path


def accounts(place: Path, *words: object) -> dict[str, Any]:
    """Return the command's JSON, by slice, for GPU 0; and its totals."""
    found = json.loads(ok("account", "--mount", place, "--format", "json", *words))
    return {one["slice"]: one for one in found["slices"] if one["gpu"] == 0} | {"total": found["total"]}


def made(mount: Mounted, place: Path) -> str:
    """Make a cgroup and its slice, which stays when it is empty; return its path."""
    place.mkdir(exist_ok=True)
    (mount / slice_directory(slice_path(place))).mkdir(parents=True)
    return f"/{slice_path(place)}"


@contextlib.contextmanager
def slices(mount: Mounted, above: Path, *names: str) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a cgroup's slice, and of slices in it, which exist while needed."""
    yield (made(mount, above), *(made(mount, above / name) for name in names))
    for place in (*(above / name for name in names), above):
        (mount / slice_directory(slice_path(place))).rmdir()


def worked(mount: Mounted, place: Path, *options: str) -> tuple[int, float, float]:
    """Run a tenant in a cgroup until it has done some work, and end it. Return the microseconds of that work, and the
    least and the greatest number of seconds for which it can have been there."""
    path = mount / slice_directory(slice_path(place)) / "0"
    with Tenant(mount, *options, "--kernel", "1ms", "--depth", "8", "--report", "0.05") as tenant:
        stand(tenant)
        before = tenant.flat("gcgroup.stat")
        began = time.monotonic()
        enter(tenant.pid, place)
        eventually(lambda: int((path / "gmem.current").read_text()), "it is in the slice")
        came = time.monotonic()
        tenant.write("compute.freeze", 0)
        eventually(lambda: tenant.flat("gcgroup.stat")["finished"] > before["finished"] + 20, "it has done something")
        stand(tenant)
        usec = tenant.flat("gcgroup.stat")["busy_usec"] - before["busy_usec"]
        least = time.monotonic() - came
    eventually(lambda: not tenant.group.exists(), "its end is known")
    return usec, least, time.monotonic() - began


def stand(tenant: Tenant) -> None:
    """Stop a tenant's work for good."""
    tenant.write("compute.freeze", 1)
    eventually(lambda: "frozen 1" in (tenant.group / "compute.events").read_text(), "it is frozen")


def test_it_agrees_with_what_ran_over_a_kill_and_an_upgrade(place: Path) -> None:
    """The figures of the slice and of those above it include tenants that have ended; a total counts each once."""
    with cgroup("ggroupaccount.slice") as above, daemons(place) as start:
        busy, before_held = 0.0, 0
        mount = start()
        outer, inner = made(mount, above), made(mount, above / "in.service")
        since = accounts(place, inner)[inner]["since"]
        for ending in ("killed", "upgraded", "left"):
            usec, least, most = worked(mount, above / "in.service", "--gmem", "8M")
            found = accounts(place)
            now = found[inner]["busy_seconds"]
            assert now - busy == pytest.approx(usec / 1e6, abs=1e-5), ending
            assert found[outer]["busy_seconds"] == now
            assert found["total"]["busy_seconds"] == now
            assert found[inner]["peak_bytes"] == found[outer]["peak_bytes"] == 8 * MIB
            held = int(found[inner]["resident_byte_seconds"])
            assert 8 * MIB * least - 1 <= held - before_held <= 8 * MIB * most + 1, ending
            assert found[outer]["resident_byte_seconds"] == pytest.approx(held, abs=MIB)
            assert found[inner]["since"] == since, ending
            busy, before_held = now, held
            if ending == "killed":
                kill(mount)
                mount = start()
            elif ending == "upgraded":
                ok("upgrade", place)
            again = accounts(place)[inner]
            assert (again["busy_seconds"], again["resident_byte_seconds"]) == (now, held), ending


def test_names_formats_and_totals(mount: Mounted) -> None:
    with cgroup("ggroupaccount.slice") as above, slices(mount, above, "a", "b") as paths:
        for name in ("a", "b"):
            worked(mount, above / name, "--gmem", "4M")
        top = slice_path(above)
        found = accounts(mount.path, top, "--sort", "name")
        assert list(found) == [*paths, "total"]
        whole, one, other = (found[path]["busy_seconds"] for path in paths)
        assert whole == pytest.approx(one + other, abs=1e-5)
        assert found["total"]["busy_seconds"] == whole, "those in it are counted once"
        assert accounts(mount.path, f"{top}/b", f"{top}/a")["total"]["busy_seconds"] == pytest.approx(whole, abs=1e-5)
        assert list(accounts(mount.path, mount / "slice" / top / "a")) == [f"/{top}/a", "total"]
        assert accounts(mount.path, top, f"{top}/a") == accounts(mount.path, top)

        rows = list(csv.DictReader(io.StringIO(ok("account", "--mount", mount.path, "--format", "csv", top))))
        assert {row["slice"]: row["busy_seconds"] for row in rows} == {
            path: str(one["busy_seconds"]) for path, one in found.items()
        }
        table = ok("account", "--mount", mount.path, "--sort", "name", top).splitlines()
        assert [line.split()[0] for line in table] == ["SLICE", *paths, "total"]
        assert table[1].split()[4] == f"{whole:.1f}"
        assert accounts(mount.path, top, "--gpu", 7) == {"total": dict.fromkeys(found["total"])}


def test_a_slice_that_has_used_nothing_is_told_where_it_is_named(mount: Mounted) -> None:
    (mount / "slice/idle.slice").mkdir()
    assert "/idle.slice" not in accounts(mount.path)
    assert accounts(mount.path, "idle.slice")["/idle.slice"]["gpu_seconds"] == 0
    (mount / "slice/idle.slice").rmdir()


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("nothing.slice",), "nothing.slice: there is no such slice", 1),
        (("..",), "'..' is no pid, no cgroup", 2),
        (("1",), "accounts are of slices", 2),
    ],
)
def test_what_is_no_slice(mount: Mounted, words: tuple[str, ...], says: str, code: int) -> None:
    assert says in complaint("account", "--mount", mount.path, *words, code=code)


def test_no_tree(place: Path) -> None:
    assert "no ggroup tree is mounted" in complaint("account", "--mount", place, code=1)
