"""The command ``ggroupfs-dra``: the driver of a node, the hook of its containers, and a check that the driver
answers."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ggroupfs import VERSION

OK, FAILED, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["hook"]:
        # Every container waits for the hook, so it imports nothing of what follows.
        from ggroupfs.dra import hook

        return hook.main(words[1:])
    return _driver(words)


def _driver(argv: Sequence[str]) -> int:
    try:
        import grpc  # noqa: F401 - checks that it is installed
    except ImportError:
        print("ggroupfs-dra: it needs grpcio and protobuf: pip install 'ggroupfs[dra]'", file=sys.stderr)
        return FAILED
    from ggroupfs.dra import check, driver
    from ggroupfs.dra.api import Access, of_pod

    arguments = _parser().parse_args(argv)
    level = logging.INFO if arguments.verbose else logging.WARNING
    logging.basicConfig(level=level, format="ggroupfs-dra: %(message)s")
    if arguments.command == "check":
        return check.run(arguments.kubelet)
    if not arguments.node:
        print("ggroupfs-dra: --node: which node this is (or NODE_NAME in the environment)", file=sys.stderr)
        return USAGE
    try:
        access = (
            Access(arguments.api_server, arguments.ca, arguments.token, arguments.certificate)
            if arguments.api_server
            else of_pod()
        )
        one = driver.Driver(
            driver.Options(
                node=arguments.node,
                tree=arguments.tree,
                host_tree=arguments.host_tree or os.fspath(arguments.tree),
                kubelet=arguments.kubelet,
                cdi=arguments.cdi,
                state=arguments.state,
                hook=arguments.hook or shutil.which("ggroupfs-dra") or os.path.abspath(sys.argv[0]),
                library=arguments.library or None,
                beside=arguments.beside or None,
                access=access,
            )
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: one.end())
        one.run()
    except (OSError, RuntimeError) as error:
        print(f"ggroupfs-dra: {error}", file=sys.stderr)
        return FAILED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ggroupfs-dra", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("serve", "check"), default="serve", help="serve is the default")
    parser.add_argument("--version", action="version", version=f"ggroupfs-dra {VERSION}")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is done, too")
    parser.add_argument("--node", default=os.environ.get("NODE_NAME"), help="name of the node (NODE_NAME)")
    place = parser.add_argument_group("places")
    place.add_argument("--tree", type=Path, default=Path("/run/ggroup"), help="mountpoint of the tree")
    place.add_argument("--host-tree", help="the same on the host, for hooks")
    place.add_argument("--kubelet", type=Path, default=Path("/var/lib/kubelet"), help="directory of the kubelet")
    place.add_argument("--cdi", type=Path, default=Path("/var/run/cdi"), help="directory of CDI specifications")
    place.add_argument("--state", type=Path, default=Path("/run/ggroupfs-dra"), help="directory of prepared claims")
    container = parser.add_argument_group("what containers get, by paths of the host")
    container.add_argument("--hook", help="the command ggroupfs-dra")
    container.add_argument("--library", help="libggroup-cuda.so, for limits of memory; none without")
    container.add_argument("--beside", help="CDI device of the GPU itself, such as nvidia.com/gpu={uuid}")
    server = parser.add_argument_group("API server; that of the pod where --api-server is not said")
    server.add_argument("--api-server", help="URL")
    server.add_argument("--ca", type=Path, help="file with the certificates that it is trusted by")
    server.add_argument("--token", type=Path, help="file with a token")
    server.add_argument("--certificate", type=Path, help="file with a client's certificate and key")
    return parser
