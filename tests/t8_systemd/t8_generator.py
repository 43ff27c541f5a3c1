"""Services with memory keys but without `ggroupfs run`, on a real systemd: the library is in their programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.container.guest import Guest
from tests.t8_systemd.units import MIB, SLICES, until_holds

UNITS = "/etc/systemd/system"
LIBRARY = "/usr/lib/ggroupfs/backend/cuda/libggroup-cuda.so"
SOCKET = "/run/ggroupfs/ggroup.sock"
SLEEPS = "[Service]\nType=exec\nExecStart=/usr/bin/sleep infinity\n"
"""A service that counts as started once its program runs, so that the program's environment can be read."""
KEYS = "[X-GGroup]\nGMemHigh=32M\n"


@contextlib.contextmanager
def started(guest: Guest, name: str, text: str) -> Iterator[str]:
    """The PID of the main process of a service with this unit file."""
    guest.write(f"{UNITS}/{name}", text)
    guest.ok(f"systemctl daemon-reload && systemctl start {name}")
    try:
        yield guest.ok(f"systemctl show -P MainPID {name}").strip()
    finally:
        guest.ok(f"systemctl stop {name}; rm -r {UNITS}/{name}*; systemctl daemon-reload")


def environment(guest: Guest, pid: str) -> dict[str, str]:
    words = guest.ok(f"tr '\\0' '\\n' </proc/{pid}/environ").splitlines()
    return dict(word.partition("=")[::2] for word in words)


def test_a_service_with_a_memory_key_has_the_library(guest: Guest) -> None:
    """The library is mapped, there are no complaints, and the service is ordered after ggroupfs.service."""
    with started(guest, "keyed.service", SLEEPS + KEYS) as pid:
        found = environment(guest, pid)
        assert (found["LD_PRELOAD"], found["GGROUP_SOCKET"]) == (LIBRARY, SOCKET)
        guest.until(f"grep -q {LIBRARY} /proc/{pid}/maps", "the library is in it")
        assert "ggroupfs.service" in guest.ok("systemctl show -P After keyed.service").split()
        assert guest.run("journalctl -q --no-pager -u keyed.service -g preload").out == ""


def test_one_without_has_not(guest: Guest) -> None:
    with started(guest, "plain.service", f"{SLEEPS}[X-GGroup]\nComputeWeight=7\n") as pid:
        assert "LD_PRELOAD" not in environment(guest, pid)


def test_a_limit_by_a_section_alone(guest: Guest) -> None:
    """The program needs nothing but the section in its unit file."""
    text = f"[Service]\nExecStart=/mnt/holder {64 * MIB}\n{KEYS}"
    with started(guest, "limited.service", text):
        until_holds(guest, f"{SLICES}/system.slice/limited.service/0", 32 * MIB)
        until_holds(guest, f"{SLICES}/system.slice/limited.service/0", 32 * MIB, "gmem.swap.current")


def test_an_instance_has_it_of_its_template_and_what_it_preloads_itself(guest: Guest) -> None:
    other = guest.ok("ls /usr/lib/*/libutil.so.1").strip()
    with contextlib.ExitStack() as stack:
        guest.write(f"{UNITS}/many@.service", f"{SLEEPS}Environment=LD_PRELOAD={other}\n{KEYS}")
        stack.callback(guest.ok, f"rm {UNITS}/many@.service; systemctl daemon-reload")
        stack.callback(guest.ok, "systemctl stop 'many@*'")
        guest.ok("systemctl daemon-reload && systemctl start many@1.service")
        pid = guest.ok("systemctl show -P MainPID many@1.service").strip()
        assert environment(guest, pid)["LD_PRELOAD"] == f"{LIBRARY}:{other}"
        guest.until(f"grep -q {LIBRARY} /proc/{pid}/maps && grep -q libutil /proc/{pid}/maps", "both are in it")


def test_an_empty_file_keeps_it_out(guest: Guest) -> None:
    guest.ok(f"mkdir {UNITS}/kept.service.d && : >{UNITS}/kept.service.d/zz-ggroupfs.conf")
    with started(guest, "kept.service", SLEEPS + KEYS) as pid:
        assert "LD_PRELOAD" not in environment(guest, pid)


def test_a_section_of_slices_d_that_is_its_name(guest: Guest) -> None:
    guest.write("/etc/ggroupfs/slices.d/named.conf", "[named.service]\nGMemHigh=32M\n")
    try:
        with started(guest, "named.service", SLEEPS) as pid:
            assert environment(guest, pid)["LD_PRELOAD"] == LIBRARY
    finally:
        guest.ok("rm /etc/ggroupfs/slices.d/named.conf")


def test_one_with_another_root_has_it_there(guest: Guest) -> None:
    """Of the host it sees only what its unit binds, and the library and the socket."""
    guest.ok("mkdir -p /srv/root/etc /srv/root/proc /srv/root/run /srv/root/usr /srv/root/tmp /srv/root/var")
    guest.ok("ln -sf usr/bin usr/lib usr/lib64 usr/sbin /srv/root/ && touch /srv/root/etc/os-release")
    text = (
        f"{SLEEPS}RootDirectory=/srv/root\nMountAPIVFS=yes\nBindReadOnlyPaths=/usr/bin /usr/lib -/usr/lib64 /usr/sbin\n"
    )
    try:
        with started(guest, "rooted.service", text + KEYS) as pid:
            guest.until(f"grep -q {LIBRARY} /proc/{pid}/maps", "the library is in it")
            assert guest.run(f"test -S /proc/{pid}/root{SOCKET}").code == 0
    finally:
        guest.ok("rm -r /srv/root")
