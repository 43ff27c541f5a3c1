"""Prepares and unprepares claims. Either can be started again at any point at which a driver was killed.

A prepared claim consists of a record and a CDI file, created in this order; the record is removed last. So whatever has
a record can be finished or undone, and a file without a record belongs to no claim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from ggroupfs.dra import cdi, slices, status
from ggroupfs.dra.api import Api, ApiError, claim_path
from ggroupfs.dra.claims import granted
from ggroupfs.dra.devices import Device
from ggroupfs.dra.parameters import Refused
from ggroupfs.dra.store import Claim, Store

log = logging.getLogger(__name__)


class Unable(Exception):
    """Raised for a claim that cannot be prepared now, with the reason; the kubelet tries again."""


@attrs.frozen
class Preparer:
    """Prepares the claims of this node."""

    api: Api
    """API server, the only source of what a claim was given: the kubelet passes just name and UID."""
    node: str
    """Name of the node, which is also that of its pool."""
    tree: Path
    """Mountpoint of the tree."""
    store: Store
    """Records of prepared claims."""
    specifications: cdi.Directory
    """CDI files of prepared claims."""
    devices: Callable[[], Sequence[Device]]
    """Finds the GPUs. OSError."""
    injected: Callable[[], cdi.Injected]
    """Returns the parts that containers get. OSError."""
    _said: set[str] = attrs.field(factory=set, init=False)
    """Failures at the last look, each of which is logged once."""

    def prepare(self, namespace: str, name: str, uid: str) -> Claim:
        """Return a claim once its containers can be started. Refused, which its status then says as well; Unable."""
        try:
            told = self.api.get(claim_path(namespace, name))
        except ApiError as error:
            raise Unable(str(error)) from None
        try:
            claim = granted(told, uid, self.node, self.devices())
        except Refused as error:
            why = str(error)
            if told["metadata"]["uid"] == uid:
                self._tell(lambda: status.refuse(self.api, told, self.node, why), uid)
            raise
        except OSError as error:
            raise Unable(f"the tree on {self.tree}: {error.strerror}: is ggroupfs mounted there?") from None
        try:
            with self.store.locked():
                self.store.keep(claim)
                self.specifications.write(claim, self.injected(), self.store.path)
        except OSError as error:
            raise Unable(f"{error.filename}: {error.strerror}") from None
        self._tell(lambda: status.clear(self.api, told, self.node), uid)
        return claim

    def unprepare(self, uid: str) -> None:
        """Return once nothing of a claim is left. Unable."""
        try:
            with self.store.locked():
                self._release(uid)
                self.specifications.remove(uid)
                self.store.forget(uid)
        except (OSError, ValueError) as error:
            raise Unable(str(error)) from None

    def cdi_ids(self, claim: Claim, number: int) -> Sequence[str]:
        """Return the CDI devices of a share. OSError."""
        return cdi.ids(claim, number, self.injected())

    def settle(self) -> None:
        """Finish what a killed driver began, and make all grants hold. OSError, ValueError."""
        with self.store.locked():
            claims, files = self.store.claims(), self.specifications.uids()
            for uid in files - set(claims):
                self.specifications.remove(uid)
            for uid in set(claims) - files:
                self.specifications.write(claims[uid], self.injected(), self.store.path)
            failures = {str(failed) for failed in slices.hold(self.store, self.tree)}
        for words in sorted(failures - self._said):
            log.warning("%s", words)
        self._said.clear()
        self._said.update(failures)

    def forget_others(self) -> None:
        """Unprepare claims that no longer exist.

        The kubelet may have forgotten them, as after its state was removed. A claim is kept if the API server does not
        answer.
        """
        for claim in self.store.claims().values():
            try:
                there = self.api.get(claim_path(claim.namespace, claim.name))
                gone = there["metadata"]["uid"] != claim.uid
            except ApiError as error:
                gone = error.status == 404
            if gone:
                log.warning("claim %s/%s (%s) is there no more: forgotten", claim.namespace, claim.name, claim.uid)
                self.unprepare(claim.uid)

    def _release(self, uid: str) -> None:
        """Take a claim's shares away from the containers that have them."""
        grants = self.store.grants()
        concerned: set[str] = set()
        for key, one in grants.items():
            kept = {
                container: [name for name in names if name.partition("/")[0] != uid]
                for container, names in one.containers.items()
            }
            if kept != one.containers:
                concerned |= {one.pod, *one.containers, *slices.above(one.pod)}
                one.containers = {container: names for container, names in kept.items() if names}
                self.store.grant(key, one)
        if concerned:
            rest = [one for one in grants.values() if one.containers and slices.exists(one.pod)]
            for failed in slices.settle(self.store, self.tree, rest, sorted(concerned)):
                log.warning("%s", failed)

    def _tell(self, write: Callable[[], None], uid: str) -> None:
        try:
            write()
        except ApiError as error:
            log.warning("claim %s: its status cannot be written: %s", uid, error)
