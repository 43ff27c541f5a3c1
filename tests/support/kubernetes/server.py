"""A double of the API server: objects over HTTP, a role's rights, strict fields, and server-side apply of status."""

from __future__ import annotations

import copy
import json
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ggroupfs.dra import NAME
from tests.support.kubernetes import schema

RESOURCE = "/apis/resource.k8s.io/v1"
TOKEN = "token-of-the-driver"


class Refusal(Exception):
    """An error as the answer to a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiServer:
    """The objects, and the rights of the driver's token."""

    def __init__(self, rules: Sequence[Mapping[str, Any]], node: str) -> None:
        self.node = node
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, int]] = []
        """Method, path and status of each request."""
        self.lock = threading.RLock()
        self._rules = rules
        self._owned: dict[str, dict[str, set[tuple[Any, ...]]]] = {}
        self._version = 0
        self.url = ""

    # As the cluster's own components, which have every right

    def put(self, path: str, thing: Mapping[str, Any]) -> dict[str, Any]:
        """Store an object as a component of the cluster writes it; it is validated as well."""
        with self.lock:
            stored = copy.deepcopy(dict(thing))
            metadata = stored.setdefault("metadata", {})
            metadata.setdefault("uid", self.objects.get(path, {}).get("metadata", {}).get("uid", str(uuid.uuid4())))
            self._version += 1
            metadata["resourceVersion"] = str(self._version)
            self._check(stored)
            self.objects[path] = stored
            return stored

    def get(self, path: str) -> dict[str, Any] | None:
        """Return an object, or None."""
        with self.lock:
            return copy.deepcopy(self.objects.get(path))

    def delete(self, path: str) -> None:
        """Remove an object."""
        with self.lock:
            self.objects.pop(path, None)

    def under(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Return the objects below a path."""
        with self.lock:
            return {path: copy.deepcopy(one) for path, one in self.objects.items() if path.startswith(prefix)}

    # As the driver

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Return the answer to a request of the driver, or raise Refusal."""
        parts = urlsplit(target)
        path, query = parts.path, parse_qs(parts.query)
        if headers.get("authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, "Unauthorized")
        verb = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]
        self._authorize(verb, path)
        thing = json.loads(body) if body else None
        with self.lock:
            if method == "GET":
                return copy.deepcopy(self._there(path))
            if method == "POST":
                return self._create(path, thing, headers)
            if method == "PUT":
                return self._update(path, thing, headers)
            if method == "PATCH":
                return self._apply(path, thing, headers, query)
        raise Refusal(405, method)

    def _there(self, path: str) -> dict[str, Any]:
        if path not in self.objects:
            raise Refusal(404, f"{path} not found")
        return self.objects[path]

    def _create(self, path: str, thing: Any, headers: Mapping[str, str]) -> dict[str, Any]:
        self._json(headers)
        name = f"{path}/{thing['metadata']['name']}"
        if name in self.objects:
            raise Refusal(409, f"{name} already exists")
        if "resourceVersion" in thing["metadata"] or "uid" in thing["metadata"]:
            raise Refusal(400, "resourceVersion and uid should not be set on objects to be created")
        return self.put(name, thing)

    def _update(self, path: str, thing: Any, headers: Mapping[str, str]) -> dict[str, Any]:
        self._json(headers)
        there = self._there(path)
        if thing["metadata"].get("resourceVersion") != there["metadata"]["resourceVersion"]:
            raise Refusal(409, "the object has been modified")
        old, new = there["spec"], thing["spec"]
        if (
            any(old.get(key) != new.get(key) for key in ("driver", "nodeName"))
            or old["pool"]["name"] != new["pool"]["name"]
        ):
            raise Refusal(422, "spec: field is immutable")
        return self.put(path, thing)

    def _apply(
        self, path: str, thing: Any, headers: Mapping[str, str], query: Mapping[str, list[str]]
    ) -> dict[str, Any]:
        """Apply ``status.devices`` on the server side: entries of this manager that are left out are removed."""
        if headers.get("content-type") != "application/apply-patch+yaml" or "fieldManager" not in query:
            raise Refusal(415, "only server-side apply is understood here")
        if not path.endswith("/status"):
            raise Refusal(405, "the driver applies to status alone")
        path = path.removesuffix("/status")
        there = copy.deepcopy(self._there(path))
        if thing["metadata"].get("uid", there["metadata"]["uid"]) != there["metadata"]["uid"]:
            raise Refusal(409, "the UID in the precondition does not match")
        if set(thing["status"]) != {"devices"}:
            raise Refusal(403, "resourceclaims/binding: no right to change the allocation")
        # Each field of the applied object is checked; required fields are checked on the merged object.
        self._check({**thing, "spec": there["spec"]})
        manager = query["fieldManager"][0]
        owned = self._owned.setdefault(path, {}).setdefault(manager, set())
        entries = {key: entry for key, entry in schema.entries(there) if key not in owned}
        applied = dict(schema.entries(thing))
        if any(key[0] != NAME for key in applied):
            raise Refusal(403, "resourceclaims/driver: the devices of another driver")
        nodes = {
            result["pool"] for result in there["status"]["allocation"]["devices"]["results"] if result["driver"] == NAME
        }
        if nodes != {self.node}:
            raise Refusal(403, "associated-node: the claim is allocated on another node")
        entries.update(applied)
        owned.clear()
        owned |= set(applied)
        there["status"]["devices"] = list(entries.values())
        return self.put(path, there)

    def _check(self, thing: Mapping[str, Any]) -> None:
        try:
            schema.check(thing)
            if thing["kind"] == "ResourceSlice":
                schema.check_slice(thing)
            if thing["kind"] == "ResourceClaim" and "allocation" in thing.get("status", {}):
                schema.check_claim(thing)
        except schema.Invalid as error:
            raise Refusal(422, str(error)) from None

    @staticmethod
    def _json(headers: Mapping[str, str]) -> None:
        if headers.get("content-type") != "application/json":
            raise Refusal(415, "the body is to be application/json")

    def _authorize(self, verb: str, path: str) -> None:
        parts = path.strip("/").split("/")
        group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
        if rest[0] == "namespaces" and len(rest) > 2:
            rest = rest[2:]
        resource, name, subresource = rest[0], (rest[1] if len(rest) > 1 else ""), "/".join(rest[2:])
        needed = [(verb, f"{resource}/{subresource}" if subresource else resource, name)]
        if (resource, subresource) == ("resourceclaims", "status"):
            needed.append((f"associated-node:{verb}", "resourceclaims/driver", NAME))
        for one in needed:
            if not any(self._allows(rule, group, *one) for rule in self._rules):
                raise Refusal(403, f"forbidden: cannot {one[0]} {one[1]} {one[2]} in the group {group!r}")

    @staticmethod
    def _allows(rule: Mapping[str, Any], group: str, verb: str, resource: str, name: str) -> bool:
        names = rule.get("resourceNames")
        return (
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and (names is None or name in names)
        )


@contextmanager
def listening(server: ApiServer, directory: Path) -> Iterator[Path]:
    """Serve on a port of the loopback interface; yield the file with the driver's token."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {key.lower(): value for key, value in self.headers.items()}
            try:
                status, told = 200, server.answer(self.command, self.path, headers, body)
            except Refusal as refusal:
                status = refusal.status
                told = {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "status": "Failure",
                    "message": str(refusal),
                    "code": status,
                }
            server.asked.append((self.command, self.path, status))
            raw = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    token = directory / "token"
    token.write_text(f"{TOKEN}\n")
    try:
        yield token
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
