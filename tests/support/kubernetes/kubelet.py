"""A double of the kubelet's DRA manager: finds plugins, accepts those with a version it knows, has claims prepared."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import grpc

from ggroupfs.dra import NAME
from ggroupfs.dra.interfaces import dra_pb2, health_pb2, registration_pb2
from tests.support.kubernetes.server import RESOURCE, ApiServer

SPEAKS = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""Versions of the interface that a kubelet of 1.36 accepts, the preferred one first."""
HEALTH = "v1alpha1.DRAResourceHealth"
"""Version of the health interface that it accepts."""
CDI_ID = re.compile(
    r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]/[A-Za-z][A-Za-z0-9_-]*[A-Za-z0-9]=[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?"
)
"""Fully qualified name of a CDI device (tags.cncf.io/container-device-interface, pkg/parser)."""
ANSWER_S = 45.0
"""Seconds within which a claim must be prepared."""


class Broken(AssertionError):
    """An answer that a kubelet would refuse."""


@attrs.frozen
class Prepared:
    """The driver's answer for one claim."""

    error: str
    """Reason why it was not prepared; empty if it was."""
    ids: Mapping[str, Sequence[str]]
    """Ids of CDI devices by request."""


def _whole(message: Any) -> Any:
    """Refuse a message with fields that the interface does not have."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    if len(UnknownFieldSet(message)):
        raise Broken(f"unknown fields in {type(message).__name__}")
    return message


class Kubelet:
    """The DRA manager of one node."""

    def __init__(self, place: Path, server: ApiServer, speaks: Sequence[str] = SPEAKS) -> None:
        self._place = place
        self._server = server
        self.speaks = speaks
        """Versions of the interface that it accepts."""
        self._seen: tuple[int, int] | None = None
        self.endpoint: Path | None = None
        self.versions: Sequence[str] = ()
        (place / "plugins_registry").mkdir(parents=True)
        self.wipe()

    # Plugins

    @property
    def socket(self) -> Path:
        """Path of the driver's registration socket."""
        return self._place / "plugins_registry" / f"{NAME}-reg.sock"

    def wipe(self) -> None:
        """Remove the ResourceSlices of drivers that are not registered, as a starting kubelet does."""
        for path in self._server.under(f"{RESOURCE}/resourceslices/"):
            self._server.delete(path)

    def look(self) -> bool:
        """Look for a new or restarted plugin; return whether one was registered."""
        try:
            status = self.socket.stat()
        except FileNotFoundError:
            self.endpoint, self._seen = None, None
            return False
        if self._seen == (status.st_ino, status.st_ctime_ns):
            return False
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            info = self._call(channel, "GetInfo", registration_pb2.InfoRequest(), registration_pb2.PluginInfo)
            assert (info.type, info.name) == ("DRAPlugin", NAME)
            taken = next((version for version in self.speaks if version in info.supported_versions), None)
            told = registration_pb2.RegistrationStatus(plugin_registered=taken is not None)
            if taken is None:
                told.error = f"none of {list(info.supported_versions)} is supported"
            else:
                self.endpoint, self.versions = Path(info.endpoint), list(info.supported_versions)
            self._call(channel, "NotifyRegistrationStatus", told, registration_pb2.RegistrationStatusResponse)
        self._seen = (status.st_ino, status.st_ctime_ns)
        return taken is not None

    def register(self, seconds: float = 60.0) -> None:
        """Wait for a new or restarted plugin, and for its ResourceSlice."""
        self._until(self.try_look, "a plugin", seconds)
        self._until(lambda: bool(self._server.under(f"{RESOURCE}/resourceslices/")), "a ResourceSlice", seconds)

    def try_look(self) -> bool:
        """Look; return False where the plugin does not answer."""
        try:
            return self.look()
        except grpc.RpcError:  # not there yet, or gone
            return False

    @staticmethod
    def _until(condition: Callable[[], bool], what: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"never came: {what}"
            time.sleep(0.02)

    @staticmethod
    def _call(channel: Any, method: str, request: Any, answer: Any) -> Any:
        call = channel.unary_unary(
            f"/pluginregistration.Registration/{method}", lambda message: message.SerializeToString(), answer.FromString
        )
        return _whole(call(request, timeout=5))

    # Claims

    def _ask(self, method: str, request: Any, answer: Any) -> Any:
        assert self.endpoint is not None, "no plugin is registered"
        with grpc.insecure_channel(f"unix:{self.endpoint}") as channel:
            call = channel.unary_unary(
                f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{method}",
                lambda message: message.SerializeToString(),
                answer.FromString,
            )
            return _whole(call(request, timeout=ANSWER_S))

    def prepare(self, *claims: Mapping[str, Any]) -> list[Prepared]:
        """Have claims prepared; Broken for an answer that a kubelet would refuse."""
        request = dra_pb2.NodePrepareResourcesRequest(claims=[_claim(claim) for claim in claims])
        answer = self._ask("NodePrepareResources", request, dra_pb2.NodePrepareResourcesResponse)
        if set(answer.claims) != {claim["metadata"]["uid"] for claim in claims}:
            raise Broken(f"answered for {sorted(answer.claims)}")
        return [self._prepared(claim, _whole(answer.claims[claim["metadata"]["uid"]])) for claim in claims]

    def _prepared(self, claim: Mapping[str, Any], answer: Any) -> Prepared:
        if answer.error:
            return Prepared(answer.error, {})
        found: dict[str, list[str]] = {}
        allocated = {
            (one["pool"], one["device"], one.get("shareID"), one["request"])
            for one in claim["status"]["allocation"]["devices"]["results"]
            if one["driver"] == NAME
        }
        told = set()
        for device in map(_whole, answer.devices):
            share = device.share_id if device.HasField("share_id") else None
            for request in device.request_names:
                told.add((device.pool_name, device.device_name, share, request))
                found.setdefault(request, []).extend(device.cdi_device_ids)
            for name in device.cdi_device_ids:
                if not CDI_ID.fullmatch(name):
                    raise Broken(f"no CDI device: {name}")
        if told != allocated:
            raise Broken(f"answered {told}, allocated is {allocated}")
        return Prepared("", found)

    def unprepare(self, *claims: Mapping[str, Any]) -> list[str]:
        """Have claims unprepared; return the error of each."""
        request = dra_pb2.NodeUnprepareResourcesRequest(claims=[_claim(claim) for claim in claims])
        answer = self._ask("NodeUnprepareResources", request, dra_pb2.NodeUnprepareResourcesResponse)
        if set(answer.claims) != {claim["metadata"]["uid"] for claim in claims}:
            raise Broken(f"answered for {sorted(answer.claims)}")
        return [answer.claims[claim["metadata"]["uid"]].error for claim in claims]

    # Health

    def health(self, ended: threading.Event) -> Iterator[Mapping[str, tuple[str, str]]]:
        """Yield health and message by device, as the driver streams them, until `ended` is set."""
        assert HEALTH in self.versions
        with grpc.insecure_channel(f"unix:{self.endpoint}") as channel:
            stream = channel.unary_stream(
                f"/{HEALTH}/NodeWatchResources",
                lambda message: message.SerializeToString(),
                health_pb2.NodeWatchResourcesResponse.FromString,
            )(health_pb2.NodeWatchResourcesRequest())
            for answer in stream:
                if ended.is_set():
                    return
                yield {
                    one.device.device_name: (health_pb2.HealthStatus.Name(one.health), one.message)
                    for one in map(_whole, answer.devices)
                }


def _claim(claim: Mapping[str, Any]) -> Any:
    metadata = claim["metadata"]
    return dra_pb2.Claim(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
