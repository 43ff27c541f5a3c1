"""Puts this process into a transient scope, as ``systemd-run --scope --slice=`` does."""

from __future__ import annotations

from collections.abc import Sequence

from backend.process import procfs
from ggroupfs import mounts

NAME = "org.freedesktop.systemd1"
ANSWER_S = 25.0
"""Seconds that systemd has to answer, as for every method call (sd_bus_set_method_call_timeout(3))."""


def is_for(name: str) -> bool:
    """Whether systemd has to make the slice of that name on this machine."""
    return name.endswith(".slice") and "/" not in name and mounts.SYSTEMD.is_dir()


def enter(slice_: str, command: Sequence[str], address: str = "SYSTEM") -> None:
    """Return once this process is in a scope of its own, in a slice. RuntimeError with the reason."""
    try:
        _enter(slice_, command, address)
    except ImportError as error:
        raise RuntimeError(f"run: --slice {slice_}: systemd cannot be asked: {error}") from None
    except (OSError, LookupError, ValueError) as error:  # jeepney's errors have no common class
        raise RuntimeError(f"run: --slice {slice_}: systemd: {error}") from None


def _enter(slice_: str, command: Sequence[str], address: str) -> None:
    from jeepney import DBusAddress, MatchRule, MessageType, message_bus, new_method_call
    from jeepney.io.blocking import open_dbus_connection

    manager = DBusAddress("/org/freedesktop/systemd1", NAME, f"{NAME}.Manager")
    removed = MatchRule(type="signal", interface=manager.interface, member="JobRemoved", path=manager.object_path)
    with open_dbus_connection(address) as connection:

        def call(message: object) -> tuple[object, ...]:
            reply = connection.send_and_get_reply(message, timeout=ANSWER_S)
            if reply.header.message_type is MessageType.error:
                raise RuntimeError(f"run: --slice {slice_}: {''.join(map(str, reply.body[:1]))}")
            return tuple(reply.body)

        # Use the pid by which the bus and systemd know this process: in a container our own means another process
        # there.
        (pid,) = call(message_bus.GetConnectionUnixProcessID(connection.unique_name))
        unit = f"ggroupfs-run-{pid}.scope"
        properties = [
            ("Description", ("s", " ".join(command))),
            ("Slice", ("s", slice_)),
            ("PIDs", ("au", [pid])),
            ("CollectMode", ("s", "inactive-or-failed")),
        ]
        call(message_bus.AddMatch(f"sender='{NAME}',{removed.serialise()}"))
        with connection.filter(removed, bufsize=1000) as jobs:
            call(new_method_call(manager, "Subscribe"))
            body: tuple[object, ...] = (unit, "fail", properties, [])
            (job,) = call(new_method_call(manager, "StartTransientUnit", "ssa(sv)a(sa(sv))", body))
            while True:
                _, path, _, result = connection.recv_until_filtered(jobs, timeout=ANSWER_S).body
                if path == job:
                    break
    if result != "done":
        raise RuntimeError(f"run: --slice {slice_}: {unit}: {result}")
    if not any(one.path.endswith(f"/{unit}") for one in procfs.cgroups("self")):
        raise RuntimeError(f"run: --slice {slice_}: {unit}: this process is not in it")
