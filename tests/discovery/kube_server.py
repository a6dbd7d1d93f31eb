"""A double of the Kubernetes API on loopback with list and watch, versions, bookmarks, expiry and errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.ports import free_port

TOKEN = "not-a-secret"
PODS = "/api/v1/namespaces/default/pods"


def pod(name: str, address: str | None, port: int = 5557, replay: int | None = 5558, **more: Any) -> dict[str, Any]:
    """Return a Pod object in the form of the Kubernetes API. ``more`` overrides the pod's metadata."""
    ports = [{"name": "kv-events", "containerPort": port, "protocol": "TCP"}]
    if replay is not None:
        ports.append({"name": "kv-replay", "containerPort": replay, "protocol": "TCP"})
    return {
        "metadata": {"name": name, "namespace": "default", "labels": {"app": "engine"}, **more},
        "spec": {"containers": [{"name": "engine", "ports": ports}]},
        "status": {"phase": "Running"} | ({} if address is None else {"podIP": address}),
    }


class KubeServer:
    """A double of the Kubernetes API: the objects of one kind with their versions, and the newest events.

    A watch can start from any version since the oldest of these events.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.token = TOKEN
        self.version = 100
        self.objects: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self.oldest = 0
        self.status = 200
        self.answer: bytes | None = None
        """A body that the server sends instead of every list; None: the server answers as usual."""
        self.lists = 0
        self.watched_from: list[str] = []
        self._changed = asyncio.Condition()
        self._watches: set[asyncio.Task[None]] = set()

    def _next(self, of: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        return {**of, "metadata": {**of["metadata"], "resourceVersion": str(self.version)}}

    def put(self, of: dict[str, Any]) -> None:
        name = of["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = self._next(of)
        self._record(kind, self.objects[name])

    def delete(self, name: str) -> None:
        self._record("DELETED", self._next(self.objects.pop(name)))

    def bookmark(self, versions: int) -> None:
        """Send a bookmark to all watches, as after ``versions`` changes of objects that they do not watch."""
        self.version += versions
        self._record("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}})

    def error(self, code: int, message: str) -> None:
        """Send an error event to all watches, which then end."""
        self.version += 1
        self._record("ERROR", {"kind": "Status", "code": code, "message": message})

    def forget(self) -> None:
        """Forget all events, so that no watch can start from an older version."""
        self.oldest = self.version
        self.events.clear()

    def end_watches(self) -> None:
        for task in self._watches:
            task.cancel()

    def _record(self, kind: str, of: dict[str, Any]) -> None:
        self.events.append((self.version, kind, of))

    @contextlib.asynccontextmanager
    async def running(self, context: ssl.SSLContext | None = None) -> AsyncIterator[KubeServer]:
        app = web.Application()
        app.router.add_get(PODS, self._get)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=context).start()
        try:
            yield self
        finally:
            self.end_watches()
            await runner.cleanup()

    def settings(self, directory: Path) -> dict[str, str]:
        """Return the discovery settings for this server, with a valid token."""
        token = directory / "token"
        token.write_text(f"{TOKEN}\n")
        return {"server": f"http://127.0.0.1:{self.port}", "token_file": str(token), "namespace": "default"}

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.status != 200:
            return _status(self.status, f'{request.path.rpartition("/")[2]} is forbidden: User "kvbus" cannot list it')
        if self.answer is not None:
            return web.Response(body=self.answer)
        assert request.query["labelSelector"] == "app=engine"
        if request.query.get("watch") == "true":
            return await self._watch(request)
        self.lists += 1
        return web.json_response(
            {
                "kind": "PodList",
                "metadata": {"resourceVersion": str(self.version)},
                "items": list(self.objects.values()),
            }
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = request.query["resourceVersion"]
        self.watched_from.append(version)
        if int(version) < self.oldest:
            return _status(410, f"too old resource version: {version} ({self.oldest})")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.create_task(self._send(response, int(version)))
        self._watches.add(task)
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await task
        self._watches.discard(task)
        return response

    async def _send(self, response: web.StreamResponse, version: int) -> None:
        while True:
            for at, kind, of in list(self.events):
                if at > version:
                    version = at
                    line = json.dumps({"type": kind, "object": of}).encode() + b"\n"
                    for half in (line[:20], line[20:]):  # a line may arrive in several parts
                        await response.write(half)
                    if kind == "ERROR":
                        return
            await asyncio.sleep(0.01)


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)
