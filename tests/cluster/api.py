"""A client of the Kubernetes API for tests. It derives paths from objects, and records every warning."""

from __future__ import annotations

import json
import ssl
import time
import uuid
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

Object = dict[str, Any]

RESTRICTED: Final = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}

OLD: Final = {"componentstatuses", "endpoints", "events"}
"""Kinds of objects that the inventory ignores, because they are deprecated or expire."""

PATIENCE: Final = 60.0
"""Maximum seconds for which the client repeats a request that the server is not ready to answer."""


class RefusedError(Exception):
    """An error: the Kubernetes API has refused a request."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status} {said}")
        self.status = status


class Api:
    """A client of one Kubernetes API server as one user, with a new connection for each request.

    Args:
        url: URL of the server.
        token: token of the user. If None, the client is anonymous.
        ca_file: certificate of the authority that signed the server's certificate.
    """

    def __init__(self, url: str, token: str | None = None, ca_file: Path | None = None) -> None:
        self.url = url
        self.token = token
        self.ca_file = ca_file
        self.warnings: list[str] = []
        """Texts of the warnings that the server has sent in headers of its answers."""
        self._context = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
        self._resources: dict[tuple[str, str], tuple[str, bool]] = {}

    def as_user(self, token: str) -> Api:
        return Api(self.url, token, self.ca_file)

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Send a request, and return the answer.

        Raises:
            RefusedError: the status of the answer is not 2xx.
        """
        until = time.monotonic() + PATIENCE
        while True:
            status, text = self._ask(method, path, body, kind)
            if status != 429 or time.monotonic() > until:
                break
            time.sleep(0.05)
        if status >= 300:
            raise RefusedError(status, text)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def _ask(self, method: str, path: str, body: Any, kind: str) -> tuple[int, str]:
        at = urlsplit(self.url)
        assert at.hostname is not None
        made: HTTPConnection
        if self._context is None:
            made = HTTPConnection(at.hostname, at.port, timeout=60)
        else:
            made = HTTPSConnection(at.hostname, at.port, timeout=60, context=self._context)
        headers = {"Content-Type": kind, "Accept": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            made.request(method, path, None if body is None else json.dumps(body), headers)
            answer = made.getresponse()
            self.warnings += answer.headers.get_all("Warning", [])
            return answer.status, answer.read().decode()
        finally:
            made.close()

    def answers(self, path: str) -> bool:
        try:
            self.ask("GET", path)
        except (RefusedError, HTTPException, OSError):
            return False
        return True

    def get(self, path: str) -> Any:
        return self.ask("GET", path)

    def post(self, path: str, body: Any) -> Any:
        return self.ask("POST", path, body)

    # -- objects

    def resources(self) -> list[tuple[str, str, Object]]:
        """Return each kind of object that the server knows.

        Each entry has the path of its API group, its apiVersion, and its description by the API.
        """
        groups = [each["preferredVersion"]["groupVersion"] for each in self.get("/apis")["groups"]]
        found = []
        for version in ("v1", *groups):
            base = "/api/v1" if version == "v1" else f"/apis/{version}"
            found += [(base, version, each) for each in self.get(base)["resources"]]
        return found

    def path(self, of: Object) -> str:
        """Return the URL path of an object in the Kubernetes API."""
        return f"{self._collection(of)}/{quote(of['metadata']['name'])}"

    def _collection(self, of: Object) -> str:
        key = of["apiVersion"], of["kind"]
        if key not in self._resources:
            base = "/api/v1" if key[0] == "v1" else f"/apis/{key[0]}"
            for each in self.get(base)["resources"]:
                if "/" not in each["name"]:
                    self._resources[key[0], each["kind"]] = f"{base}/{{}}{each['name']}", each["namespaced"]
        path, namespaced = self._resources[key]
        return path.format(f"namespaces/{of['metadata'].get('namespace', 'default')}/" if namespaced else "")

    def read(self, of: Object) -> Object:
        return dict(self.get(self.path(of)))

    def create(self, of: Object, *, dry_run: bool = False) -> Object:
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return dict(self.post(f"{self._collection(of)}?{urlencode(query)}", of))

    def apply(self, of: Object, *, dry_run: bool = False) -> Object:
        """Apply an object with server-side apply, even if other field managers own some of its fields."""
        query = {"fieldManager": "tests", "force": "true", "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        path = f"{self.path(of)}?{urlencode(query)}"
        return dict(self.ask("PATCH", path, of, "application/apply-patch+yaml"))

    def set_status(self, of: Object, status: Object) -> None:
        self.ask("PATCH", f"{self.path(of)}/status", {"status": status}, "application/merge-patch+json")

    def delete(self, of: Object, *, grace: int = 0) -> None:
        self.ask("DELETE", f"{self.path(of)}?gracePeriodSeconds={grace}")

    def namespace(self, labels: dict[str, str] | None = None, name: str | None = None) -> str:
        """Create a namespace with a default service account, which a controller would create in a real cluster.

        Return its name.
        """
        name = name or f"test-{uuid.uuid4().hex[:8]}"
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}})
        self.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}})
        return name

    def inventory(self, namespace: str) -> set[tuple[str, str]]:
        """Return the kind and name of every object in a namespace, and of every object outside all namespaces."""
        found = set()
        for base, _, each in self.resources():
            if "/" in each["name"] or "list" not in each["verbs"] or each["name"] in OLD:
                continue
            place = f"namespaces/{namespace}/" if each["namespaced"] else ""
            items = self.get(f"{base}/{place}{each['name']}")["items"] or []
            found |= {(each["kind"], item["metadata"]["name"]) for item in items}
        return found

    def token_of(self, namespace: str, account: str, bound: Object | None = None, **spec: Any) -> str:
        """Return a token of a service account.

        The token is valid for an hour, and only while the object exists to which it is bound.
        """
        if bound is not None:
            to = {key: bound[key] for key in ("apiVersion", "kind")}
            spec["boundObjectRef"] = to | {key: bound["metadata"][key] for key in ("name", "uid")}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        at = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.post(at, body)["status"]["token"])


def placed(each: Object, namespace: str) -> Object:
    """Return a copy of the object in this namespace, unless the object names a namespace itself."""
    return {**each, "metadata": {"namespace": namespace, **each["metadata"]}}
