"""Results of the self-test, kept for later daemons.

The self-test takes three seconds of a GPU that programs use, and a daemon that was killed, or upgraded, has to be
back within two. A result holds for the same GPU in the same boot with the same driver, and only where all levers were
proven; a GPU with an unproven lever is tested again. Only root can write to the file; a file that cannot be read or
written counts as absent.
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
"""Version of the self-test: results of an earlier version are discarded."""
BOOT = Path(procfs.BOOT)
DRIVER = Path("/proc/driver/nvidia/version")
"""File with the driver's version and build."""


GR_ALONE = "compute.gr"
"""Capability that is not a control: to take only the GR engine from a program, whose copies go on. Without it, all
engines are taken.
"""

SPATIAL = "compute.spatial"
"""The control of spaces, which takes a program that not every machine has."""
OPTIONAL = (GR_ALONE, SPATIAL)
"""What need not be proven for the rest to be kept."""


@attrs.frozen
class Verdict:
    """The effect of one control on one GPU, with the evidence."""

    control: str
    """Name of the control's file, or GR_ALONE."""
    capability: Capability
    """The capability to promise."""
    evidence: str
    """A sentence with the measured figures."""


@attrs.define
class Proven:
    """The file of results."""

    path: Path
    """The file."""
    boot: Path = BOOT
    """File that identifies this boot."""
    driver: Path = DRIVER
    """File that identifies the driver."""

    def of(self, uuid: str) -> Sequence[Verdict]:
        """Return what was proven of a GPU; empty if nothing was, or not in this boot with this driver."""
        found = self._known().get(uuid, {})
        return [Verdict(control, Capability.ENFORCED, evidence) for control, evidence in found.items()]

    def keep(self, uuid: str, verdicts: Sequence[Verdict]) -> None:
        """Record the verdicts of a GPU if all its controls were proven. Those in OPTIONAL are recorded if proven, and
        need not be.
        """
        proven = {
            verdict.control: verdict.evidence for verdict in verdicts if verdict.capability is Capability.ENFORCED
        }
        if any(verdict.control not in proven for verdict in verdicts if verdict.control not in OPTIONAL):
            return
        gpus = {**self._known(), uuid: proven}
        try:
            boot, driver = self._here()
            self._write(json.dumps({"edition": EDITION, "boot": boot, "driver": driver, "gpus": gpus}))
        except OSError as error:
            log.info("%s: %s: the next daemon will test its levers again", self.path, error.strerror)

    def _known(self) -> Mapping[str, Mapping[str, str]]:
        """Return the recorded evidence: by GPU, and then by control."""
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
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait
        with open(fd, encoding="utf-8") as file:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise PermissionError(f"{self.path} is not ours")
            return file.read(1 << 20)

    def _write(self, text: str) -> None:
        """Replace the file, whole or not at all."""
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
