"""The check of a liveness probe: whether the driver answers at both of its sockets."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc

from ggroupfs.dra import NAME
from ggroupfs.dra.interfaces import dra_pb2, registration_pb2
from ggroupfs.dra.plugin import PREPARING, REGISTRATION

ANSWER_S = 5.0
"""Seconds within which the driver has to answer."""


def run(kubelet: Path) -> int:
    """Send requests that a kubelet sends, and that change nothing; return the exit code."""
    info = registration_pb2.InfoRequest(), registration_pb2.PluginInfo
    empty = dra_pb2.NodePrepareResourcesRequest(), dra_pb2.NodePrepareResourcesResponse
    service = next(iter(PREPARING.values()))
    calls = (
        (kubelet / "plugins_registry" / f"{NAME}-reg.sock", f"/{REGISTRATION}/GetInfo", info),
        (kubelet / "plugins" / NAME / "dra.sock", f"/{service}/NodePrepareResources", empty),
    )
    for socket, method, (request, answer) in calls:
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            call = channel.unary_unary(method, lambda message: message.SerializeToString(), answer.FromString)
            try:
                call(request, timeout=ANSWER_S)
            except grpc.RpcError as error:
                print(f"ggroupfs-dra: {socket}: {error.code().name}: {error.details()}", file=sys.stderr)
                return 1
    return 0
