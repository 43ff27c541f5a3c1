"""Units that hold memory of the software GPU, started and ended in the guest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.container.guest import Guest

MIB = 1 << 20
SLICES = "/run/ggroup/slice"


@contextlib.contextmanager
def holding(guest: Guest, name: str, nbytes: int, *properties: str, slice_: str = "system.slice") -> Iterator[str]:
    """Run a service whose program holds that many bytes; its directory in the tree. It is restarted when it fails."""
    words = [f"-p {word}" for word in (*properties, "Restart=always", "RestartSec=1s", "StartLimitIntervalSec=0")]
    guest.ok(f"systemd-run -q --unit={name} --slice={slice_} {' '.join(words)} /mnt/holder {nbytes}")
    try:
        yield f"{SLICES}/{slice_}/{name}.service/0"
    finally:
        guest.ok(f"systemctl stop {name}.service")


def until_holds(guest: Guest, place: str, nbytes: int, name: str = "gmem.current") -> None:
    """Wait until a file of the tree has this number."""
    guest.until(f"test $(cat {place}/{name}) = {nbytes}", f"{place}/{name} is {nbytes}")


@contextlib.contextmanager
def mounted_with(guest: Guest, options: str) -> Iterator[None]:
    """Let the service mount with these options, and without any afterwards."""
    edit = "sed -i 's/^OPTIONS=.*/OPTIONS={}/' /etc/default/ggroupfs && systemctl restart ggroupfs"
    guest.ok(edit.format(options))
    try:
        yield
    finally:
        guest.ok(edit.format(""))


def daemon(guest: Guest) -> int:
    """The PID of the service's main process."""
    return int(guest.ok("systemctl show -P MainPID ggroupfs"))


def until_mounted_again(guest: Guest, dead: int) -> None:
    """Wait until the service serves a tree again, with another process."""
    guest.until(
        f'test "$(systemctl is-active ggroupfs)" = active && ! grep -qx "pid {dead}" /run/ggroup/ggroup.backend'
        " && grep -q '^pid ' /run/ggroup/ggroup.backend",
        "the tree is back",
    )
