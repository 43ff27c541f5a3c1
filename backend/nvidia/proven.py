"""What the self-test found, for the daemons after this one: it takes three seconds of a GPU that others use, and a
daemon that was killed, or becomes another version, is to be back within two.

It counts for the same GPU in the same boot with the same driver, and only where all levers were proven: what was not is
tested again. A file that nobody but root can write to; one that cannot be read, or written, is none.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from backend.core.records import Capability
from backend.process import procfs

log = logging.getLogger(__name__)

EDITION = 2
"""Of the self-test: what an earlier one proved is proven anew."""
BOOT = Path(procfs.BOOT)
DRIVER = Path("/proc/driver/nvidia/version")
"""Its version, and when and by what it was built."""


GR_ALONE = "compute.gr"
"""Capability that is no control: to take the GR engine alone from a program, whose copies go on. Without it all engines
are taken."""


@attrs.frozen
class Verdict:
    """What one control does on one GPU, and how we know."""

    control: str
    """File name, or GR_ALONE."""
    capability: Capability
    """What to promise."""
    evidence: str
    """A sentence, with the figures that were measured."""


@attrs.define
class Proven:
    """See the module."""

    path: Path
    """Where."""
    boot: Path = BOOT
    """What tells this boot from others."""
    driver: Path = DRIVER
    """... and this driver."""

    def of(self, uuid: str) -> Sequence[Verdict]:
        """What was proven of a GPU; empty: nothing, or not here and now."""
        found = self._known().get(uuid, {})
        return [Verdict(control, Capability.ENFORCED, evidence) for control, evidence in found.items()]

    def keep(self, uuid: str, verdicts: Sequence[Verdict]) -> None:
        """Notes it, where all controls were proven. GR_ALONE is noted where it was, too."""
        proven = {
            verdict.control: verdict.evidence for verdict in verdicts if verdict.capability is Capability.ENFORCED
        }
        if any(verdict.control not in proven for verdict in verdicts if verdict.control != GR_ALONE):
            return
        gpus = {**self._known(), uuid: proven}
        try:
            boot, driver = self._here()
            self._write(json.dumps({"edition": EDITION, "boot": boot, "driver": driver, "gpus": gpus}))
        except OSError as error:
            log.info("%s: %s: the next daemon will test its levers again", self.path, error.strerror)

    def _known(self) -> Mapping[str, Mapping[str, str]]:
        """Of each GPU, the evidence for each control."""
        try:
            found = json.loads(self._text())
            if (found["edition"], found["boot"], found["driver"]) != (EDITION, *self._here()):
                return {}
            return {
                str(uuid): {str(key): str(words) for key, words in of.items()} for uuid, of in found["gpus"].items()
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.debug("nothing is known to be proven: %r", error)
            return {}

    def _here(self) -> tuple[str, str]:
        return procfs.text(self.boot), procfs.text(self.driver)

    def _text(self) -> str:
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # or a FIFO waits
        with open(fd, encoding="utf-8") as file:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise PermissionError(f"{self.path} is not ours")
            return file.read(1 << 20)

    def _write(self, text: str) -> None:
        """Whole or not at all."""
        self.path.parent.mkdir(mode=0o755, exist_ok=True)
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
            beside.rename(self.path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
