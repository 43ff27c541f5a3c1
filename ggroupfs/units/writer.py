"""Writes settings on a group with the table of the control files, so the same values are refused."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping

from backend.core.controller import Controller
from backend.process.identity import Group
from ggroupfs.fs.controls import CONTROLS
from ggroupfs.text.properties import BY_NAME, text_of
from ggroupfs.units.settings import Mistake, Setting

BY_CONTROL = {control.name: control for control in CONTROLS}


async def write(
    controller: Controller, group: Group, wanted: Mapping[str, Setting], dropped: Iterable[str]
) -> tuple[set[str], list[Mistake]]:
    """Write the wanted settings, and the defaults of `dropped` properties, which no file names any more.

    Returns the properties written, and the refused settings. OSError(ENODEV) if the group is gone.
    """
    written: set[str] = set()
    for name in dropped:
        await _write_one(controller, group, name, "")
    refused: dict[str, OSError] = {}
    # Twice, since one limit may block another: for example a high limit that the old swap.max has no room for.
    for names in (list(wanted), refused):
        for name in list(names):
            if error := await _write_one(controller, group, name, wanted[name].value):
                refused[name] = error
            else:
                refused.pop(name, None)
                written.add(name)
    return written, [wanted[name].mistake(_words(group, error)) for name, error in refused.items()]


async def _write_one(controller: Controller, group: Group, name: str, value: str) -> OSError | None:
    """Write one property, and return the error that prevented it."""
    capacity = controller.gpus[group.gpu].info.capacity
    control, text = text_of(name, value, capacity)
    row = BY_CONTROL[control]
    assert row.parse is not None
    assert row.apply is not None, f"{BY_NAME[name]} is a file that can be written"
    asked = row.parse(text)
    try:
        await row.apply(controller, group, asked)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise
        if error.errno in (errno.EBUSY, errno.EAGAIN) and row.show is not None:
            # A value already in force is still requested, even if the group exceeds it now, as after a restart of the
            # daemon.
            return None if row.parse(row.show(controller, group).strip()) == asked else error
        return error
    return None


def _words(group: Group, error: OSError) -> str:
    return f"GPU {group.gpu}: {error.strerror}"
