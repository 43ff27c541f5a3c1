"""The plugin as the kubelet sees it: registration, preparation of claims, and health of devices, over gRPC.

An interface has versions, each a service with its own name. Versions with the same messages share one implementation,
and the kubelet chooses among the versions that GetInfo names.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from ggroupfs.dra import NAME
from ggroupfs.dra.health import Watcher
from ggroupfs.dra.interfaces import dra_pb2, health_pb2, registration_pb2
from ggroupfs.dra.parameters import Refused
from ggroupfs.dra.preparing import Preparer, Unable

log = logging.getLogger(__name__)

PREPARING: Mapping[str, str] = {"v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"}
"""Versions of the interface that prepares claims, and their services. Every kubelet with consumable capacity (1.34)
supports this one."""
HEALTH: Mapping[str, str] = {
    f"{version}.DRAResourceHealth": f"{version}.DRAResourceHealth" for version in ("v1", "v1beta1", "v1alpha1")
}
"""Versions of the interface that reports the health of devices, and their services; 1.34 and 1.35 support the
last one."""
REGISTRATION = "pluginregistration.Registration"

THREADS = 16
"""Calls answered at the same time. A kubelet that watches health occupies one of them throughout."""
HEALTH_S = 10.0
"""Seconds between two messages of health; the kubelet considers a device's health unknown after 30."""


class Services:
    """The implementation of the calls."""

    def __init__(
        self, preparer: Preparer, watcher: Watcher, endpoint: Path, registered: Callable[[bool], None]
    ) -> None:
        self._preparer = preparer
        self._watcher = watcher
        self._endpoint = endpoint
        self._registered = registered
        self.ended = threading.Event()
        """Set when streams have to end."""

    # Registration

    def get_info(self, request: Any, context: Any) -> Any:
        """Answer GetInfo: describe the plugin, and the versions that it supports."""
        versions = [*PREPARING, *HEALTH]
        return registration_pb2.PluginInfo(
            type="DRAPlugin", name=NAME, endpoint=str(self._endpoint), supported_versions=versions
        )

    def notify(self, status: Any, context: Any) -> Any:
        """Handle NotifyRegistrationStatus."""
        if not status.plugin_registered:
            log.error("the kubelet does not take this plugin: %s", status.error or "no reason given")
        self._registered(status.plugin_registered)
        return registration_pb2.RegistrationStatusResponse()

    # Preparing

    def prepare(self, request: Any, context: Any) -> Any:
        """Answer NodePrepareResources: for each claim, its devices or an error."""
        answer = dra_pb2.NodePrepareResourcesResponse()
        for asked in request.claims:
            one = answer.claims[asked.uid]
            try:
                claim = self._preparer.prepare(asked.namespace, asked.name, asked.uid)
                for number, share in enumerate(claim.shares):
                    one.devices.add(
                        request_names=[share.request],
                        pool_name=share.pool,
                        device_name=share.device,
                        cdi_device_ids=self._preparer.cdi_ids(claim, number),
                        share_id=share.share_id,
                    )
            except (Refused, Unable, OSError, ValueError) as error:
                del one.devices[:]
                one.error = str(error)
                log.warning("claim %s/%s: %s", asked.namespace, asked.name, error)
            except Exception as error:  # a bug, which must not affect the other claims
                log.exception("claim %s/%s", asked.namespace, asked.name)
                del one.devices[:]
                one.error = f"{type(error).__name__}: {error}"
        return answer

    def unprepare(self, request: Any, context: Any) -> Any:
        """Answer NodeUnprepareResources."""
        answer = dra_pb2.NodeUnprepareResourcesResponse()
        for asked in request.claims:
            answer.claims[asked.uid].SetInParent()
            try:
                self._preparer.unprepare(asked.uid)
            except Unable as error:
                answer.claims[asked.uid].error = str(error)
                log.warning("claim %s/%s: %s", asked.namespace, asked.name, error)
        return answer

    # Health

    def watch(self, request: Any, context: Any) -> Iterator[Any]:
        """Stream the health of all devices: at once, after each change, and often enough not to become unknown."""
        seen = -1
        while context.is_active() and not self.ended.is_set():
            seen, devices = self._watcher.wait(seen, HEALTH_S)
            answer = health_pb2.NodeWatchResourcesResponse()
            for one in devices:
                answer.devices.add(
                    device=health_pb2.DeviceIdentifier(pool_name=self._preparer.node, device_name=one.name),
                    health=health_pb2.HealthStatus.Value(one.health),
                    last_updated_time=int(one.at),
                    message=one.message,
                )
            yield answer


def serve(socket: Path, services: Services, preparing: bool) -> Any:
    """Listen on a socket, replacing whatever was there; return the server. OSError, RuntimeError."""
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)
    server = grpc.server(ThreadPoolExecutor(THREADS, thread_name_prefix=socket.name))
    handlers = _of_preparing(services) if preparing else _of_registration(services)
    server.add_generic_rpc_handlers(tuple(handlers))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server


def _of_registration(services: Services) -> Iterator[Any]:
    info, told = registration_pb2.InfoRequest, registration_pb2.RegistrationStatus
    methods = {"GetInfo": _unary(services.get_info, info), "NotifyRegistrationStatus": _unary(services.notify, told)}
    yield grpc.method_handlers_generic_handler(REGISTRATION, methods)


def _of_preparing(services: Services) -> Iterator[Any]:
    methods = {
        "NodePrepareResources": _unary(services.prepare, dra_pb2.NodePrepareResourcesRequest),
        "NodeUnprepareResources": _unary(services.unprepare, dra_pb2.NodeUnprepareResourcesRequest),
    }
    for service in PREPARING.values():
        yield grpc.method_handlers_generic_handler(service, methods)
    stream = grpc.unary_stream_rpc_method_handler(
        services.watch, health_pb2.NodeWatchResourcesRequest.FromString, _bytes
    )
    for service in HEALTH.values():
        yield grpc.method_handlers_generic_handler(service, {"NodeWatchResources": stream})


def _unary(answer: Callable[[Any, Any], Any], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(answer, request.FromString, _bytes)


def _bytes(message: Any) -> bytes:
    raw: bytes = message.SerializeToString()
    return raw
