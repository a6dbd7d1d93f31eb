"""For each kind of discovery, real files or a server in which a test lets engines appear and leave, and which can
fail.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from aiohttp import web

from tests.discovery.fleet import write
from tests.discovery.kube_server import KubeServer, pod
from tests.ports import free_port

SERVER_INFO = "/sglang.runtime.v1.SglangService/GetServerInfo"


@dataclass(frozen=True)
class Address:
    """The host of an engine, its live port and its replay port."""

    host: str
    port: int
    replay_port: int

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://{self.host}:{self.replay_port}"


class World(ABC):
    """The engines that exist, and the file or server in which kvbus finds them."""

    kind: ClassVar[str]
    one: ClassVar = False
    """Whether this kind of discovery finds at most one engine at a time."""
    says_ranks: ClassVar = False
    """Whether this kind of discovery always learns the number of an engine's ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        yield self

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The configuration by which kvbus discovers the engines of this world."""

    @abstractmethod
    def have(self, engines: dict[str, Address]) -> None:
        """Let exactly these engines exist, by name."""

    @abstractmethod
    def spoil(self, name: str) -> str:
        """Let the entry of this engine be invalid until the next :meth:`have`, and return the invalid value.

        In a world with one engine, ``name`` is one of its ranks, as in :meth:`have`.
        """

    @abstractmethod
    def fail(self) -> None:
        """Let the file or server give no answers, or invalid answers."""

    @abstractmethod
    def heal(self) -> None:
        """Let the file or server answer again as before :meth:`fail`."""

    def some(self, *numbers: int) -> tuple[int, ...]:
        """Return these engine numbers; only the first one if the world can have only one engine."""
        return numbers[:1] if self.one else numbers

    def place(self, number: int) -> Address:
        """Return the address that the engine with this number has."""
        return Address("127.0.0.1", 7000 + 10 * number, 7001 + 10 * number)

    def name(self, number: int) -> str:
        """Return the name under which kvbus finds the engine with this number."""
        return f"pod-{number}"

    def pair(self) -> tuple[str, str]:
        """Return the labels of two engines or, in a world with one engine, of two of its ranks."""
        return (f"{self.name(1)}/0", f"{self.name(1)}/1") if self.one else (self.name(1), self.name(2))


class FileWorld(World):
    kind = "file"

    @property
    def path(self) -> Path:
        return self.directory / "engines.json"

    @property
    def settings(self) -> dict[str, Any]:
        return {"path": str(self.path), "interval": 0.02}

    def have(self, engines: dict[str, Address]) -> None:
        self.text = [
            {"name": name, "endpoint": at.endpoint, "replay_endpoint": at.replay_endpoint}
            for name, at in engines.items()
        ]
        self.heal()

    def spoil(self, name: str) -> str:
        self.text = [each | {"data_parallel_size": "auto"} if each["name"] == name else each for each in self.text]
        self.heal()
        return "auto"

    def fail(self) -> None:
        self.path.unlink()

    def heal(self) -> None:
        write(self.path, self.text)


def dns_world(directory: Path) -> World:
    from tests.discovery.dns_server import DnsServer, dns  # noqa: PLC0415 - an extra

    class DnsWorld(World):
        """A headless Service as CoreDNS serves it: SRV records of two named ports, and an address for each host."""

        kind = "dns"
        domain = "engines.default.svc.cluster.local"

        def __init__(self) -> None:
            super().__init__(directory)
            self.server = DnsServer()

        @contextlib.asynccontextmanager
        async def running(self) -> AsyncIterator[Self]:
            async with self.server.running():
                yield self

        @property
        def settings(self) -> dict[str, Any]:
            return {
                "name": f"_kv._tcp.{self.domain}",
                "replay_name": f"_replay._tcp.{self.domain}",
                "servers": [self.server.address],
                "interval": 0.02,
            }

        def have(self, engines: dict[str, Address]) -> None:
            records: dict[tuple[str, str], list[str]] = {}
            for name, at in engines.items():
                host = f"{name}.{self.domain}."
                records[host, "A"] = [at.host]
                records.setdefault((f"_kv._tcp.{self.domain}.", "SRV"), []).append(f"0 50 {at.port} {host}")
                records.setdefault((f"_replay._tcp.{self.domain}.", "SRV"), []).append(f"0 50 {at.replay_port} {host}")
            self.server.records = records

        def spoil(self, name: str) -> str:
            key, end = (f"_kv._tcp.{self.domain}.", "SRV"), f" {name}.{self.domain}."
            records = self.server.records
            bad = [f"0 50 0{end}" if each.endswith(end) else each for each in records[key]]
            self.server.records = {**records, key: bad}
            return "port in the SRV record = 0"

        def fail(self) -> None:
            self.server.rcode = dns.rcode.SERVFAIL

        def heal(self) -> None:
            self.server.rcode = dns.rcode.NOERROR

    return DnsWorld()


class HttpWorld(World):
    """The HTTP API of one engine, as in vLLM 0.33."""

    kind = "http"
    one = True
    says_ranks = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.port = free_port()
        self.answer: Any = {}
        self.broken = False

    async def _handle(self, _request: web.Request) -> web.Response:
        if self.broken:
            return web.Response(status=500)
        return web.Response(body=self.answer) if isinstance(self.answer, bytes) else web.json_response(self.answer)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        app = web.Application()
        app.router.add_get("/kv_event_sources", self._handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    @property
    def settings(self) -> dict[str, Any]:
        return {"url": f"http://127.0.0.1:{self.port}", "interval": 0.02}

    def have(self, engines: dict[str, Address]) -> None:
        self.answer = {
            str(rank): {
                "publisher": "zmq",
                "endpoint": f"tcp://*:{at.port}",
                "replay_endpoint": at.replay_endpoint,
                "topic": "",
            }
            for rank, at in enumerate(engines.values())
        }

    def spoil(self, name: str) -> str:
        rank = name.rpartition("/")[2]
        self.answer = {**self.answer, rank: {**self.answer[rank], "endpoint": "tcp://*:99999"}}
        return "tcp://*:99999"

    def fail(self) -> None:
        self.broken = True

    def heal(self) -> None:
        self.broken = False

    def name(self, number: int) -> str:
        return "workers"


class KubernetesWorld(World):
    """A Kubernetes API with pods that have two named ports."""

    kind = "kubernetes"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.server = KubeServer()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        async with self.server.running():
            yield self

    @property
    def settings(self) -> dict[str, Any]:
        return {"selector": "app=engine", **self.server.settings(self.directory)}

    def have(self, engines: dict[str, Address]) -> None:
        for name in self.server.objects.keys() - engines.keys():
            self.server.delete(name)
        for name, at in engines.items():
            self.server.put(pod(name, at.host, at.port, at.replay_port))

    def spoil(self, name: str) -> str:
        made = self.server.objects[name]
        notes = {"kvbus/data-parallel-size": "auto"}
        self.server.put({**made, "metadata": {**made["metadata"], "annotations": notes}})
        return "auto"

    def fail(self) -> None:
        self.server.status = 503
        self.server.end_watches()

    def heal(self) -> None:
        self.server.status = 200


def grpc_world(directory: Path) -> World:
    import grpc  # noqa: PLC0415 - an extra

    from tests.front.grpc_pod import message  # noqa: PLC0415 - an extra

    class Node:
        """A node's API, which runs in threads, so that the test's event loop has only the tasks of the discovery."""

        answer = b""

        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            return grpc.unary_unary_rpc_method_handler(self._answer) if details.method == SERVER_INFO else None

        def _answer(self, _: bytes, context: grpc.ServicerContext) -> bytes:
            if not self.answer:
                context.abort(grpc.StatusCode.UNAVAILABLE, "it starts")
            return self.answer

    class GrpcWorld(World):
        """Two nodes of one SGLang engine. Only the second node publishes."""

        kind = "grpc"
        one = True
        says_ranks = True

        def __init__(self, directory: Path) -> None:
            super().__init__(directory)
            self.nodes = [Node(), Node()]
            self.ports = [free_port(), free_port()]

        @contextlib.asynccontextmanager
        async def running(self) -> AsyncIterator[Self]:
            self.have({})
            servers = []
            for node, port in zip(self.nodes, self.ports, strict=True):
                server = grpc.server(ThreadPoolExecutor(2), handlers=(node,), options=[("grpc.so_reuseport", 0)])
                server.add_insecure_port(f"127.0.0.1:{port}")
                server.start()
                servers.append(server)
            try:
                yield self
            finally:
                for server in servers:
                    server.stop(0).wait()

        @property
        def settings(self) -> dict[str, Any]:
            return {"nodes": [f"127.0.0.1:{port}" for port in self.ports], "interval": 0.02}

        def have(self, engines: dict[str, Address]) -> None:
            self.sources = [
                {
                    "dp_rank": rank,
                    "endpoint": f"tcp://*:{at.port}",
                    "replay_endpoint": at.replay_endpoint,
                    "topic": "",
                }
                for rank, at in enumerate(engines.values())
            ]
            self.heal()

        def spoil(self, name: str) -> str:
            self.sources[int(name.rpartition("/")[2])]["endpoint"] = "tcp://*:99999"
            self.heal()
            return "tcp://*:99999"

        def fail(self) -> None:
            self.nodes[1].answer = b""

        def heal(self) -> None:
            for node, sources in zip(self.nodes, ([], self.sources), strict=True):
                info = json.dumps({"kv_events": None, "kv_event_sources": sources})
                node.answer = message(f1=info.encode())

        def name(self, number: int) -> str:
            return "workers"

    return GrpcWorld(directory)


WORLDS: dict[str, Callable[[Path], World]] = {
    "dns": dns_world,
    "file": FileWorld,
    "grpc": grpc_world,
    "http": HttpWorld,
    "kubernetes": KubernetesWorld,
}
