"""[X-GGroup] in unit files, on a real systemd: which services get which limits, and from when on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.container.guest import Guest
from tests.t8_systemd.units import MIB, SLICES, daemon, mounted_with, until_holds

UNITS = "/etc/systemd/system"
CROWD = int(os.environ.get("GGROUP_CROWD", "200"))
"""How many services start at once."""
WAIT_S = 300
"""Seconds that a program waits for its limits, 30 times the default: on a machine with other work, a crowd takes that
much longer to start than on an idle one."""
CROWD_S = 600
"""Seconds that a crowd may take to start, or to end."""
PAGE = 2 * MIB
"""A page of the software GPU. An allocation is charged page by page, and the excess is reclaimed after each page."""


def service(nbytes: int, section: str, more: str = "") -> str:
    """The unit file of a service whose program holds that many bytes."""
    return f"[Service]\nExecStart=/mnt/holder {nbytes}\n{more}\n[X-GGroup]\n{section}\n"


@contextlib.contextmanager
def unit(guest: Guest, name: str, text: str) -> Iterator[None]:
    """Install a unit file. At the end the file is removed, with all drop-ins, and the unit's processes are ended."""
    guest.write(f"{UNITS}/{name}", text)
    guest.ok("systemctl daemon-reload")
    try:
        yield
    finally:
        guest.run(f"systemctl stop '{name.replace('@', '@*')}'", CROWD_S)
        guest.ok(f"rm -r {UNITS}/{name}*; systemctl daemon-reload")


def start(guest: Guest, name: str) -> str:
    """Start a service, and return its directory in the tree."""
    guest.ok(f"systemctl start {name}")
    return f"{SLICES}/system.slice/{name}/0"


@pytest.fixture
def patient(guest: Guest) -> Iterator[Guest]:
    """A daemon that makes programs wait for as long as a busy machine may take. At the end it has let no program start
    without limits, and the watchdog has not ended it."""
    with mounted_with(guest, f"-o units.wait={WAIT_S}"):
        began = daemon(guest)
        yield guest
        assert daemon(guest) == began
        assert guest.run(f"journalctl -q --no-pager -u ggroupfs _PID={began} -g 'not configured'").out == ""


def test_a_limit_holds_before_the_first_allocation_is_done(guest: Guest) -> None:
    """A setting that this GPU does not support is logged with its file and line, and all other settings apply."""
    text = service(1024 * MIB, "GMemHigh=512M\nComputeTimeSlice=5s")
    with unit(guest, "limited.service", text):
        place = start(guest, "limited.service")
        until_holds(guest, place, 512 * MIB)
        until_holds(guest, place, 512 * MIB, "gmem.swap.current")
        assert guest.ok(f"cat {place}/gmem.limit.high") == f"{512 * MIB}\n"
        assert int(guest.ok(f"cat {place}/gmem.peak")) <= 512 * MIB + PAGE
        line = text.splitlines().index("ComputeTimeSlice=5s") + 1
        said = f"journalctl -q --no-pager -u ggroupfs -g '{UNITS}/limited.service:{line}: .*ComputeTimeSlice'"
        guest.until(said, "the mistake is logged")


def test_a_mistake_is_logged_where_it_stands_and_the_rest_applies(guest: Guest) -> None:
    text = service(64 * MIB, "GMemHigh=lots\nGMemSwapMax=48M\nNonsense=1\nComputeTimeSlice=1ms")
    with unit(guest, "mistaken.service", text):
        place = start(guest, "mistaken.service")
        until_holds(guest, place, 64 * MIB)
        assert guest.ok(f"cat {place}/gmem.limit.high {place}/gmem.swap.max").split() == ["max", str(48 * MIB)]
        for key in ("GMemHigh=lots", "Nonsense=1"):
            line = text.splitlines().index(key) + 1
            said = f"journalctl -q --no-pager -u ggroupfs -g '{UNITS}/mistaken.service:{line}: '"
            guest.until(said, f"{key} is logged")


def test_a_drop_in_wins(guest: Guest) -> None:
    with unit(guest, "dropped.service", service(64 * MIB, "GMemHigh=48M\nGMemSwapMax=1G")):
        guest.write(f"{UNITS}/dropped.service.d/more.conf", "[X-GGroup]\nGMemHigh=32M\n")
        guest.ok("systemctl daemon-reload")
        place = start(guest, "dropped.service")
        until_holds(guest, place, 32 * MIB)
        assert guest.ok(f"cat {place}/gmem.swap.max") == f"{1024 * MIB}\n"
        assert int(guest.ok(f"cat {place}/gmem.peak")) <= 32 * MIB + PAGE


def test_what_is_written_at_run_time_lasts_until_daemon_reload(guest: Guest) -> None:
    """At the reload the unit files are read again, with any changes in them."""
    with unit(guest, "reloaded.service", service(64 * MIB, "GMemHigh=32M")):
        place = start(guest, "reloaded.service")
        until_holds(guest, place, 32 * MIB)
        guest.ok(f"echo 16M >{place}/gmem.limit.high")
        until_holds(guest, place, 16 * MIB)
        guest.ok("systemctl daemon-reload")
        until_holds(guest, place, 32 * MIB, "gmem.limit.high")
        guest.ok(f"sed -i s/=32M/=48M/ {UNITS}/reloaded.service && systemctl daemon-reload")
        until_holds(guest, place, 48 * MIB, "gmem.limit.high")


def test_a_process_that_moves_has_the_limits_of_where_it_is(guest: Guest) -> None:
    with (
        unit(guest, "wide.service", service(64 * MIB, "GMemHigh=64M")),
        unit(guest, "narrow.service", service(2 * MIB, "GMemHigh=16M")),
    ):
        wide, narrow = start(guest, "wide.service"), start(guest, "narrow.service")
        until_holds(guest, wide, 64 * MIB)
        until_holds(guest, narrow, 2 * MIB)
        guest.ok("systemctl show -P MainPID wide >/sys/fs/cgroup/system.slice/narrow.service/cgroup.procs")
        until_holds(guest, narrow, 16 * MIB)


def test_a_slice_limits_all_that_is_in_it(patient: Guest) -> None:
    """A crowd starts at once in the innermost of three slices. The middle one is the tightest: it allows half of what
    the crowd holds."""
    tight = CROWD * PAGE
    levels = {"deep.slice": "1G", "deep-er.slice": str(tight), "deep-er-still.slice": "512M"}
    with contextlib.ExitStack() as stack:
        for name, high in levels.items():
            stack.enter_context(unit(patient, name, f"[Slice]\n\n[X-GGroup]\nGMemHigh={high}\n"))
        text = service(2 * PAGE, "GMemHigh=1G", "Slice=deep-er-still.slice")
        stack.enter_context(unit(patient, "inner@.service", text))
        patient.ok(f"systemctl start $(seq -f 'inner@%g.service' {CROWD})", CROWD_S)
        middle = f"{SLICES}/deep.slice/deep-er.slice/0"
        until_holds(patient, middle, tight, "gmem.swap.current")
        until_holds(patient, middle, tight)
        # Between a charge and the reclaim that follows, each other program may charge one more page.
        assert int(patient.ok(f"cat {middle}/gmem.peak")) < 2 * tight


def test_a_crowd_that_starts_at_once(patient: Guest) -> None:
    """Each service has its own limit from its first allocation on."""
    with unit(patient, "crowd@.service", service(8 * PAGE, f"GMemHigh={PAGE}")):
        patient.ok(f"systemctl start $(seq -f 'crowd@%g.service' {CROWD})", CROWD_S)
        # systemd puts the instances of a template into a slice of the template.
        places = f"{SLICES}/system.slice/system-crowd.slice/crowd@*.service/0"
        patient.until(f"test $(cat {places}/gmem.swap.current | grep -cx {7 * PAGE}) = {CROWD}", "all are limited")
        peaks = [int(line) for line in patient.ok(f"cat {places}/gmem.peak").split()]
        assert len(peaks) == CROWD
        assert max(peaks) <= 2 * PAGE
