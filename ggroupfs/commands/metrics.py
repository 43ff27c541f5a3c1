"""``ggroupfs metrics``: exports a tree for Prometheus, by HTTP, to a file, or on standard output.

The exporter is a process of its own that reads the tree with open and read. The daemon answers it among the requests of
other programs and needs no port, and the exporter needs no privileges.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from wsgiref.simple_server import WSGIRequestHandler, make_server

import attrs
from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app, write_to_textfile
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ggroupfs.mounts import DEFAULT_MOUNTPOINT
from ggroupfs.text.origins import WORDS
from ggroupfs.view.collector import TreeCollector
from ggroupfs.view.sensors import SensorCollector

PATH = "/metrics"
NO_LABEL = "none"
"""Word for no labels at all."""
IDLE_S = 30.0
"""Seconds that a client may take to send its request, or to receive the answer; each client occupies a thread."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)
    parser.add_argument("--no-processes", action="store_true", help="slices and GPUs only")
    parser.add_argument(
        "--labels",
        type=_labels,
        default=WORDS,
        metavar="WORD,...",
        help=f"labels from the path of a cgroup: some of {','.join(WORDS)} (all by default), or none",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--listen", type=_address, metavar="ADDRESS:PORT", help="serve by HTTP: 127.0.0.1:9817, [::1]:0")
    where.add_argument("--textfile", type=Path, metavar="FILE", help="write once, whole, for node_exporter")


def _labels(text: str) -> Sequence[str]:
    """Return some of WORDS. argparse.ArgumentTypeError for any other word."""
    words = [] if text == NO_LABEL else text.split(",")
    for word in words:
        if word not in WORDS:
            raise argparse.ArgumentTypeError(f"{word!r} is not a label: {', '.join(WORDS)}, or {NO_LABEL} alone")
    return words


def _address(word: str) -> tuple[str, int]:
    """Parse ADDRESS:PORT, with an IPv6 address in brackets."""
    host, colon, port = word.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise argparse.ArgumentTypeError(f"{word!r}: an IPv6 address goes in brackets")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{word!r} is not ADDRESS:PORT")
    return host, int(port)


@attrs.frozen
class Told(Collector):
    """The metrics of one scrape."""

    metrics: Sequence[Metric]
    """All metrics."""

    def collect(self) -> Sequence[Metric]:
        """Return the same metrics every time."""
        return self.metrics

    @property
    def up(self) -> bool:
        """Whether a tree answered."""
        return any(metric.name == "ggroup_up" and metric.samples[0].value for metric in self.metrics)


class Handler(WSGIRequestHandler):
    """One HTTP connection."""

    timeout = IDLE_S

    def log_message(self, format: str, *args: object) -> None:
        """Drop the message: requests are not logged."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command. In the modes that export once, the exit code is 1 if no tree answers."""
    collector = TreeCollector(arguments.mount, processes=not arguments.no_processes, labels=arguments.labels)
    if arguments.listen is not None:
        _serve(collector, SensorCollector(arguments.mount), *arguments.listen)
    told = Told(list(collector.collect()))
    if arguments.textfile is not None:
        write_to_textfile(str(arguments.textfile), told)
    else:
        sys.stdout.write(generate_latest(told).decode())
    if not told.up:
        raise RuntimeError(f"metrics: {arguments.mount}: no ggroup tree answers there")
    return 0


def _serve(collector: TreeCollector, sensors: SensorCollector, host: str, port: int) -> NoReturn:
    """Serve until interrupted, and print the address once the server listens."""
    registry = CollectorRegistry()
    registry.register(collector)
    registry.register(sensors)
    pages = make_wsgi_app(registry)

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == PATH:
            body: Iterable[bytes] = pages(environ, start)
            return body
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [f"the metrics are at {PATH}\n".encode()]

    # The first address of the name, as for any server that listens on one address.
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Server(ThreadingWSGIServer):
        address_family = family

        def handle_error(self, request: object, client_address: object) -> None:
            if not isinstance(sys.exc_info()[1], OSError):  # a client that hangs up, or sends nothing, is not logged
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    with make_server(str(address[0]), port, application, Server, Handler) as server:
        name = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
        print(f"http://{name}:{server.server_port}{PATH}", flush=True)
        server.serve_forever()
    raise AssertionError("it serves until it is interrupted")
