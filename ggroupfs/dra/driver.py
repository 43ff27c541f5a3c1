"""The driver of one node: sockets for the kubelet, the ResourceSlice, and a periodic check of what must hold."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from backend.door.client import facts_of
from ggroupfs.dra import NAME, cdi
from ggroupfs.dra.api import Access, Api, ApiError
from ggroupfs.dra.devices import Device, found
from ggroupfs.dra.health import Watcher
from ggroupfs.dra.plugin import Services, serve
from ggroupfs.dra.preparing import Preparer
from ggroupfs.dra.publishing import Publisher
from ggroupfs.dra.store import Store

log = logging.getLogger(__name__)

ROUND_S = 5.0
"""Seconds between two checks, which find for example a restarted daemon or a removed socket."""
OTHERS_S = 600.0
"""Seconds between two searches for claims that the API server no longer has."""
GRACE_S = 5.0
"""Seconds that calls have to end when the driver ends."""


@attrs.frozen(kw_only=True)
class Options:
    """The options of the command line."""

    node: str
    """Name of the node."""
    tree: Path
    """Mountpoint of the tree, as the driver sees it."""
    host_tree: str
    """Mountpoint of the tree on the host, where hooks run."""
    kubelet: Path
    """Directory of the kubelet."""
    cdi: Path
    """Directory of CDI specifications."""
    state: Path
    """Directory of prepared claims."""
    hook: str
    """Path of the command `ggroupfs-dra` on the host."""
    library: str | None
    """Path of the library for CUDA programs on the host; None: no library."""
    beside: str | None
    """CDI device of the GPU itself; None: none."""
    access: Access
    """Access to the API server."""

    @property
    def endpoint(self) -> Path:
        """Socket for the kubelet's calls."""
        return self.kubelet / "plugins" / NAME / "dra.sock"

    @property
    def registration(self) -> Path:
        """Socket at which the kubelet finds the plugin."""
        return self.kubelet / "plugins_registry" / f"{NAME}-reg.sock"


class Driver:
    """The whole driver."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._api = Api(options.access)
        store = Store(options.state)
        self._preparer = Preparer(
            self._api,
            options.node,
            options.tree,
            store,
            cdi.Directory(options.cdi),
            functools.partial(found, options.tree),
            functools.partial(_injected, options),
        )
        self._watcher = Watcher(options.tree)
        self._publisher = Publisher(self._api, options.node)
        self._services = Services(self._preparer, self._watcher, options.endpoint, self._on_registration)
        self._registered = False
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._others_at = 0.0

    def run(self) -> None:
        """Serve until :meth:`end`. OSError or RuntimeError if it cannot begin."""
        self._preparer.store.make()
        self._preparer.specifications.make()
        self._watcher.look()
        self._watcher.start()
        servers: list[Any] = []
        try:
            self._round()  # finish what was begun before the kubelet asks for more
            servers.append(serve(self._options.endpoint, self._services, preparing=True))
            servers.append(serve(self._options.registration, self._services, preparing=False))
            while not self._ended.is_set():
                self._wake.wait(ROUND_S)
                self._wake.clear()
                if not self._ended.is_set():
                    self._round()
                    self._serve_again(servers)
        finally:
            # Without its socket the kubelet considers the plugin gone, and stops calling it.
            self._options.registration.unlink(missing_ok=True)
            self._services.ended.set()
            self._watcher.stop()
            for stopped in [server.stop(GRACE_S) for server in servers]:
                stopped.wait(GRACE_S)

    def end(self) -> None:
        """Make :meth:`run` return."""
        self._ended.set()
        self._wake.set()

    def _on_registration(self, registered: bool) -> None:
        self._registered = registered
        self._wake.set()

    def _round(self) -> None:
        """Check everything once. A failure is logged, and tried again with the next check."""
        try:
            self._preparer.settle()
            if time.monotonic() - self._others_at > OTHERS_S or not self._others_at:
                self._preparer.forget_others()
                self._others_at = time.monotonic()
        except (OSError, ValueError) as error:
            log.warning("what is prepared: %s", error)
        self._watcher.look()
        devices = self._watcher.devices()
        if self._registered and devices is not None:
            self._publish(devices)

    def _publish(self, devices: Sequence[Device]) -> None:
        try:
            if self._publisher.publish(devices):
                log.info("published %d GPUs as %s", len(devices), self._publisher.name)
        except ApiError as error:
            log.warning("ResourceSlice %s: %s", self._publisher.name, error)

    def _serve_again(self, servers: list[Any]) -> None:
        """Listen again if a socket was removed, as with the directory of a kubelet that was set up anew."""
        places = ((self._options.endpoint, True), (self._options.registration, False))
        for number, (socket, preparing) in enumerate(places):
            if not socket.exists():
                log.warning("%s was removed: made again", socket)
                servers[number].stop(0).wait(GRACE_S)  # this removes a socket of that name, too
                servers[number] = serve(socket, self._services, preparing)


def _injected(options: Options) -> cdi.Injected:
    facts = facts_of(options.tree)
    socket = facts.get("socket")
    has_socket = socket is not None and socket.startswith("/")
    return cdi.Injected(
        (options.hook, "hook"),
        options.host_tree,
        socket if has_socket else None,
        options.library,
        options.beside,
    )
