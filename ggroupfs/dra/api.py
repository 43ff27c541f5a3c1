"""The API server as seen by the driver: JSON over HTTP, with the rights of the node's driver."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory with the credentials of a pod's service account."""
ANSWER_S = 10.0
"""Seconds within which an answer has to begin; the kubelet gives a driver 45 for a claim."""

RESOURCE = "/apis/resource.k8s.io/v1"


class ApiError(Exception):
    """Raised for an answer that is an error, or for no answer at all."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; 0 if there was no answer."""


@attrs.frozen
class Access:
    """The address of the API server, and the credentials for it."""

    url: str
    """URL, such as ``https://10.0.0.1:443``."""
    authority: Path | None = None
    """File with the trusted certificates; None: those of the system."""
    token: Path | None = None
    """File with the token. It is replaced before it expires, so it is read for every request."""
    certificate: Path | None = None
    """File with the client's certificate and key."""


def of_pod(environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Access:
    """Return the access to the API server that a pod is given. RuntimeError outside of a pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise RuntimeError(
            "no API server is known: this is no pod (KUBERNETES_SERVICE_HOST), and --api-server is not said"
        )
    return Access(f"https://{f'[{host}]' if ':' in host else host}:{port}", account / "ca.crt", account / "token")


class Api:
    """A client for several threads, each with a persistent connection of its own."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._url = urlsplit(access.url)
        self._own = threading.local()

    def get(self, path: str) -> Any:
        """Return an object. ApiError."""
        return self._ask("GET", path, None, "application/json")

    def post(self, path: str, body: Any) -> Any:
        """Create an object and return it. ApiError."""
        return self._ask("POST", path, body, "application/json")

    def put(self, path: str, body: Any) -> Any:
        """Replace an object and return it. ApiError."""
        return self._ask("PUT", path, body, "application/json")

    def apply(self, path: str, manager: str, body: Any) -> Any:
        """Set the fields of `body` on an object, owned by `manager`: server-side apply. ApiError."""
        return self._ask("PATCH", f"{path}?fieldManager={manager}&force=true", body, "application/apply-patch+yaml")

    def _ask(self, method: str, path: str, body: Any, kind: str) -> Any:
        headers = {"Accept": "application/json", "Content-Type": kind, "User-Agent": "ggroupfs-dra"}
        if self._access.token is not None:
            try:
                headers["Authorization"] = f"Bearer {self._access.token.read_text().strip()}"
            except OSError as error:
                raise ApiError(0, f"{self._access.token}: {error.strerror}") from None
        raw = None if body is None else json.dumps(body).encode()
        for again in (False, True):
            connection = self._connection()
            fresh = connection.sock is None
            try:
                connection.request(method, self._url.path + path, raw, headers)
                answer = connection.getresponse()
                content = answer.read()
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # A server closes idle connections, which shows only with the next request.
                if again or fresh or isinstance(error, TimeoutError):
                    raise ApiError(0, f"{self._access.url}: {str(error) or type(error).__name__}") from None
        return _understood(method, path, answer.status, content)

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if found is None:
            host, port = self._url.hostname or "", self._url.port
            if self._url.scheme == "https":
                context = ssl.create_default_context(cafile=self._access.authority and str(self._access.authority))
                if self._access.certificate is not None:
                    context.load_cert_chain(self._access.certificate)
                found = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=context)
            else:
                found = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
            self._own.connection = found
        return found


def _understood(method: str, path: str, status: int, content: bytes) -> Any:
    try:
        told = json.loads(content) if content else None
    except ValueError:
        told = None
    if 200 <= status < 300 and told is not None:
        return told
    message = told.get("message") if isinstance(told, dict) else None
    raise ApiError(status, f"{method} {path}: {status}: {message or content[:200].decode(errors='replace')}")


def claim_path(namespace: str, name: str) -> str:
    """Return the path of a ResourceClaim."""
    return f"{RESOURCE}/namespaces/{namespace}/resourceclaims/{name}"
