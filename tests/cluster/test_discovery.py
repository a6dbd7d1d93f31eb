"""Tests for kvbus's discovery of engines by a watch at a real Kubernetes API server.

Engines appear and leave, the API server stops and returns, a watch expires, and a token is rotated. No kubelet runs: a
test creates the objects and sets the engines' addresses, as a kubelet would.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvbus.parts.discovery import kubernetes
from tests.cluster.accounts import account_of
from tests.cluster.api import Api, Object, RefusedError
from tests.cluster.control_plane import ApiServer, ControlPlane
from tests.discovery.fleet import DiscoveringBus, Worker, running
from tests.doubles.bus import PATIENCE, eventually
from tests.doubles.kvbus_process import Process
from tests.doubles.socket_routers import TopicRouter
from tests.ports import free_ports


class EngineNamespace:
    """A Kubernetes namespace in which the test creates and deletes the pods of engines."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.namespace = api.namespace()
        discover = {"kubernetes": {"selector": "app=engine"}}
        values = {"mode": "deployment", "kvbus": {"config": {"sources": [{"name": "workers", "discover": discover}]}}}
        self.account = account_of(api, self.namespace, values)
        self.user = f"system:serviceaccount:{self.namespace}:{self.account}"

    def settings(self, server: ApiServer, token_file: Path) -> dict[str, Any]:
        return {
            "kubernetes": {
                "selector": "app=engine",
                "namespace": self.namespace,
                "server": server.api.url,
                "ca_file": str(server.api.ca_file),
                "token_file": str(token_file),
            }
        }

    def put_token(self, file: Path) -> None:
        file.write_text(self.api.token_of(self.namespace, self.account))

    def join(self, worker: Worker) -> None:
        of = self._pod(worker)
        self.api.create(of)
        self.api.set_status(of, {"phase": "Running", "podIP": worker.host, "podIPs": [{"ip": worker.host}]})

    def leave(self, worker: Worker) -> None:
        """Delete an engine's pod with a grace period: the pod object exists until :meth:`gone` is called."""
        self.api.delete(self._pod(worker), grace=30)

    def gone(self, worker: Worker) -> None:
        self.api.delete(self._pod(worker))

    def _pod(self, worker: Worker) -> Object:
        names = zip(("kv-events", "kv-replay"), worker.ports, strict=True)
        ports = [{"name": name, "containerPort": port} for name, port in names]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": worker.name, "namespace": self.namespace, "labels": {"app": "engine"}},
            "spec": {"nodeName": "node-a", "containers": [{"name": "engine", "image": "engine:1", "ports": ports}]},
        }


class DiscoveringProcess(Process):
    """A kvbus process that discovers its sources in Kubernetes, and publishes each worker's stream under a separate
    topic.
    """

    def __init__(self, directory: Path, discover: dict[str, Any]) -> None:
        super().__init__(directory, keeps_state=False)
        output = {"endpoint": self.out, "layout": "per_topic", "topic": "{source}", "heartbeat": 0.2}
        self.config |= {
            "sources": [{"name": "workers", "discover": discover}],
            "outputs": [output],
            "discovery_grace": 0.2,
        }
        del self.config["replay_timeout"]

    def total(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def counts(self, name: str) -> dict[str, Any]:
        (source,) = (each for each in self.sources() if each["name"] == name)
        return dict(source["counts"])


class Fleet:
    """Ten engines under traffic, and a router that must hold exactly the blocks of the engines that have a pod in
    the cluster.
    """

    def __init__(self, place: EngineNamespace, bus: DiscoveringProcess) -> None:
        self.place = place
        self.bus = bus
        shared = free_ports(2)  # pods have the same ports at different addresses
        self.workers = [Worker(f"pod-{n}", n, f"127.0.0.{n + 10}", shared) for n in range(10)]
        self.here: list[Worker] = []
        self.router = TopicRouter(bus.out)
        self._seqs: dict[bytes, int] = {}
        self._clears: dict[bytes, int] = {}
        """Number of clears that the router got for each worker after the worker's first state."""

    async def to(self, *numbers: int) -> None:
        """Let exactly these engines have a pod. The pods of all other engines are deleted, some with a grace period."""
        wanted = [self.workers[n] for n in numbers]
        before, self.here = self.here, wanted
        for worker in wanted:
            if worker not in before:
                await asyncio.to_thread(self.place.join, worker)
        leaving = [worker for worker in before if worker not in wanted]
        for worker in leaving:
            await asyncio.to_thread(self.place.leave, worker)
        for worker in leaving[::2]:
            await asyncio.to_thread(self.place.gone, worker)

    async def exact(self) -> None:
        """Wait until the router holds exactly the blocks of the engines that have a pod.

        Check that no seq went back or is missing.
        """
        for worker in self.here:
            await eventually(lambda worker=worker: worker.stored, f"traffic of {worker.name}")
            await worker.rest()
        truth = {worker.name.encode(): worker.stored for worker in self.here}
        await eventually(lambda: self.router.held == truth, f"the router exact about {sorted(truth)}")
        assert self.router.violations == []
        assert [view.violations for view in self.router.views.values() if view.violations] == []
        for worker in self.here:
            topic = worker.name.encode()
            assert self.router.next[topic] >= self._seqs.get(topic, 0)
            self._seqs[topic] = self.router.next[topic]
            self._clears.setdefault(topic, self.router.views[topic].clears)
            worker.go_on()

    async def untouched(self, *numbers: int) -> None:
        """Check that kvbus has connected to each of these engines only once, and that none of its batches was missing.

        Check also that the router got no clear of their blocks.
        """
        for worker in (self.workers[n] for n in numbers):
            assert worker.publisher.subscriptions == 1, worker.name
            topic = worker.name.encode()
            assert self.router.views[topic].clears == self._clears[topic]
            counts = await asyncio.to_thread(self.bus.counts, worker.name)
            assert (counts["gaps"], counts["restarts"], counts["missing"]) == (0, 0, 0)


@contextlib.asynccontextmanager
async def fleet_of(place: EngineNamespace, bus: DiscoveringProcess) -> AsyncIterator[Fleet]:
    fleet = Fleet(place, bus)
    try:
        for worker in fleet.workers:
            await worker.start()
        with bus:
            yield fleet
    finally:
        fleet.router.close()
        for worker in fleet.workers:
            await worker.stop()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return tmp_path / "token"


async def test_kvbus_follows_a_kubernetes_fleet_of_three_then_ten_then_two_engines(
    api: Api, server: ApiServer, tmp_path: Path, token_file: Path
) -> None:
    place = EngineNamespace(api)
    place.put_token(token_file)
    async with fleet_of(place, DiscoveringProcess(tmp_path, place.settings(server, token_file))) as fleet:
        await fleet.to(1, 4, 7)
        await fleet.exact()
        await fleet.to(*range(10))
        await fleet.exact()
        await fleet.untouched(1, 4, 7)
        await fleet.to(4, 9)
        await fleet.exact()
        await fleet.untouched(4, 9)
        await fleet.to(0, 4, 9)
        await fleet.exact()
        await fleet.untouched(4, 9)
        assert await asyncio.to_thread(fleet.bus.total, "kvbus_discovery_failures_total") == 0
    asked = server.asked(place.user)
    assert [each["verb"] for each in asked if each["verb"] == "list"] == ["list"], "one list, and the rest is watched"
    assert {each["responseStatus"]["code"] for each in asked} == {200}


async def test_kvbus_removes_no_engine_while_the_api_server_is_down(
    api: Api, plane: ControlPlane, tmp_path: Path, token_file: Path
) -> None:
    """No source is removed while the API server is down.

    When the server returns, kvbus learns which pods have changed, although etcd no longer has the version of the pods
    from which kvbus would continue its watch.
    """
    place = EngineNamespace(api)
    place.put_token(token_file)
    mortal = plane.api_server()
    bus = DiscoveringProcess(tmp_path, place.settings(mortal, token_file))
    failing: Callable[[], bool] = lambda: bus.total("kvbus_discovery_failing") == 1  # noqa: E731
    async with fleet_of(place, bus) as fleet:
        await fleet.to(1, 2, 3)
        await fleet.exact()
        for stays, then in (((1, 2, 3), (2, 3, 5, 8)), ((2, 3, 5, 8), (3, 8))):
            mortal.kill()
            await eventually(failing, "a discovery that fails")
            await fleet.exact()
            await fleet.untouched(*stays)
            await fleet.to(*then)
            await asyncio.to_thread(plane.compact)
            await asyncio.to_thread(mortal.start)
            await fleet.exact()
            await fleet.untouched(*set(stays) & set(then))
            assert not failing()


@pytest.fixture
def short_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch of kvbus, by which a watch lasts one second instead of a minute."""
    monkeypatch.setattr(kubernetes, "WATCH", 1)
    monkeypatch.setattr(kubernetes, "PAUSE", 0.05)


@pytest.mark.usefixtures("short_watches")
async def test_kvbus_reads_a_new_list_of_pods_after_its_watch_has_expired(
    api: Api, plane: ControlPlane, tmp_path: Path, token_file: Path
) -> None:
    """kvbus reads a new list of pods if its watch has expired.

    etcd has deleted the version from which kvbus would continue its watch, so the server answers the watch with 410
    Gone.
    """
    place = EngineNamespace(api)
    place.put_token(token_file)
    at_etcd = plane.api_server(watch_cache="false")
    one, two = Worker("pod-1", 1), Worker("pod-2", 2)
    for worker in (one, two):
        await worker.start()
    await asyncio.to_thread(place.join, one)

    def lists() -> int:
        return [each["verb"] for each in at_etcd.asked(place.user)].count("list")

    async with running(DiscoveringBus(place.settings(at_etcd, token_file))) as bus:
        await bus.sources("pod-1")
        source = bus.source("pod-1")
        assert lists() == 1
        other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other", "namespace": place.namespace}}
        until = time.monotonic() + PATIENCE
        while lists() == 1:
            assert time.monotonic() < until, "the list is not read again"
            await asyncio.to_thread(api.apply, {**other, "data": {"now": str(time.monotonic())}})
            await asyncio.to_thread(plane.compact)
        await asyncio.to_thread(place.join, two)
        await bus.sources("pod-1", "pod-2")
        await bus.exact(one, two)
        assert bus.source("pod-1") is source
        assert (one.publisher.subscriptions, bus.clears("pod-1"), bus.stats.failures) == (1, 0, 0)
    for worker in (one, two):
        await worker.stop()


@pytest.mark.usefixtures("short_watches")
async def test_kvbus_keeps_its_engines_if_its_token_expires_or_is_replaced(
    api: Api, server: ApiServer, tmp_path: Path, token_file: Path
) -> None:
    place = EngineNamespace(api)

    def secret(name: str) -> Object:
        """Return a new Secret to which a token can be bound.

        The API server refuses the token after the Secret is deleted.
        """
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": place.namespace}}

    def issue(name: str) -> str:
        token = api.token_of(place.namespace, place.account, api.create(secret(name)))
        new = token_file.with_suffix(".new")
        new.write_text(token)
        new.rename(token_file)
        return token

    def refused(token: str) -> bool:
        try:
            api.as_user(token).get(f"/api/v1/namespaces/{place.namespace}/pods")
        except RefusedError as error:
            return error.status == 401
        return False

    def credentials() -> int:
        extra = (each["user"]["extra"] for each in server.asked(place.user) if each["verb"] == "watch")
        return len({each["authentication.kubernetes.io/credential-id"][0] for each in extra})

    first = issue("first")
    workers = [Worker(f"pod-{n}", n) for n in (1, 2, 3)]
    one, two, three = workers
    for worker in workers:
        await worker.start()
    await asyncio.to_thread(place.join, one)
    async with running(DiscoveringBus(place.settings(server, token_file))) as bus:
        await bus.sources("pod-1")
        second = issue("second")
        await eventually(lambda: credentials() == 2, "a watch with the second token")
        await asyncio.to_thread(api.delete, secret("first"))
        await eventually(lambda: refused(first), "the end of the first token")
        await asyncio.to_thread(place.join, two)
        await bus.sources("pod-1", "pod-2")
        assert bus.stats.failures == 0
        await asyncio.to_thread(api.delete, secret("second"))
        await eventually(lambda: "401" in bus.stats.failing, "a watch that is refused")
        assert refused(second)
        await asyncio.to_thread(place.join, three)
        await bus.exact(one, two)
        issue("third")
        await bus.sources("pod-1", "pod-2", "pod-3")
        await bus.exact(*workers)
        assert one.publisher.subscriptions == two.publisher.subscriptions == 1
        assert bus.clears("pod-1") == bus.clears("pod-2") == 0
    for worker in workers:
        await worker.stop()


async def test_kvbus_reports_the_refused_user_until_it_may_list_pods(
    api: Api, server: ApiServer, token_file: Path
) -> None:
    place = EngineNamespace(api)
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
    (binding,) = api.get(f"/apis/{role['apiVersion']}/namespaces/{place.namespace}/rolebindings")["items"]
    api.delete({**role, "metadata": binding["metadata"]})
    place.put_token(token_file)
    one = Worker("pod-1", 1)
    await one.start()
    await asyncio.to_thread(place.join, one)
    async with running(DiscoveringBus(place.settings(server, token_file))) as bus:
        await eventually(lambda: bus.stats.failing, "a refusal")
        assert f'403 pods is forbidden: User "{place.user}" cannot list resource "pods"' in bus.stats.failing
        await asyncio.to_thread(account_of, api, place.namespace, {})
        for key in ("uid", "resourceVersion", "managedFields", "creationTimestamp"):
            binding["metadata"].pop(key)
        await asyncio.to_thread(api.create, {**role, **binding})
        await bus.sources("pod-1")
        await bus.exact(one)
    await one.stop()
