"""Tests for discovery by the Kubernetes API.

They test which pods and endpoints become sources, and watches that end or are refused. The API is a double that
implements list and watch as documented. The tests in tests/cluster use a real API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvbus.parts.discovery import kubernetes
from kvbus.parts.discovery.contract import DiscoveryError, Engine, Services
from kvbus.parts.discovery.kubernetes import (
    KubernetesDiscoverer,
    KubernetesSettings,
    Ports,
    of_pods,
)
from tests.discovery.kube_server import TOKEN, KubeServer, pod
from tests.doubles.bus import eventually
from tests.security.certificates import Authority

PORTS = Ports("kv-events", "kv-replay", 1)


def endpoints(engines: tuple[Engine, ...]) -> dict[str, list[tuple[str, str | None]]]:
    return {each.name: [(rank.endpoint, rank.replay_endpoint) for rank in each.publishers] for each in engines}


def endpoints_by_pod(*pods: dict[str, Any], ports: Ports = PORTS) -> dict[str, list[tuple[str, str | None]]]:
    return endpoints(of_pods(pods, ports, "here"))


def fault(one: dict[str, Any], ports: Ports = PORTS) -> str:
    """Return the fault of the engine in a pod."""
    (engine,) = of_pods([one], ports, "here")
    assert engine.publishers == ()
    (problem,) = engine.faults
    return str(problem)


# -- objects ------------------------------------------------------------------------------------------------------------


def test_a_pod_publishes_at_its_named_ports():
    assert endpoints_by_pod(pod("a", "10.0.0.1"), pod("b", "fd00::2", 7000, None)) == {
        "a": [("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")],
        "b": [("tcp://[fd00::2]:7000", None)],
    }


def test_a_pod_is_an_engine_from_its_address_to_its_deletion():
    ended = pod("e", "10.0.0.5")
    ended["status"]["phase"] = "Succeeded"
    leaving = pod("d", "10.0.0.4", deletionTimestamp="2026-11-22T12:00:00Z")
    waiting = pod("w", None)
    loading = pod("l", "10.0.0.6")
    loading["status"]["phase"] = "Pending"
    assert set(endpoints_by_pod(ended, leaving, waiting, loading)) == {"l"}


def test_annotations_of_a_pod_override_the_settings():
    notes = {"kvbus/port": "9000", "kvbus/replay-port": "9100", "kvbus/data-parallel-size": "2"}
    assert endpoints_by_pod(pod("a", "10.0.0.1", annotations=notes)) == {
        "a": [("tcp://10.0.0.1:9000", "tcp://10.0.0.1:9100"), ("tcp://10.0.0.1:9001", "tcp://10.0.0.1:9101")]
    }


@pytest.mark.parametrize("ranks", ["0", "x", "-1", "4097", "1e3", "", "99999999999"])
def test_an_invalid_number_of_ranks_in_an_annotation_is_a_fault(ranks):
    said = fault(pod("a", "10.0.0.1", annotations={"kvbus/data-parallel-size": ranks}))
    wrong = """must be a whole number from 1 to 4096; for example "2\""""
    assert said == f"annotation kvbus/data-parallel-size = {ranks!r}: {wrong}"


@pytest.mark.parametrize("port", ["0", "65535", "99999999"])
@pytest.mark.parametrize("note", ["kvbus/port", "kvbus/replay-port"])
def test_a_port_in_an_annotation_needs_room_for_all_ranks(note, port):
    said = fault(pod("a", "10.0.0.1", annotations={note: port, "kvbus/data-parallel-size": "2"}))
    wrong = "must be between 1 and 65534, because the 2 ranks have consecutive ports; for example 555"
    assert said.startswith(f"annotation {note} = {port[:6]}: {wrong}")


def test_a_port_may_be_a_number_or_belong_to_a_native_sidecar():
    plain = pod("a", "10.0.0.1")
    plain["spec"]["initContainers"] = plain["spec"].pop("containers")
    assert endpoints_by_pod(plain) == {"a": [("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")]}
    assert endpoints_by_pod(plain, ports=Ports("6000", "6001", 1)) == {
        "a": [("tcp://10.0.0.1:6000", "tcp://10.0.0.1:6001")]
    }


def test_a_port_may_be_a_number_in_the_configuration():
    settings = KubernetesSettings.model_validate({"selector": "app=engine", "port": 6000, "replay_port": "kv-replay"})
    assert (settings.port, settings.replay_port) == ("6000", "kv-replay")


@pytest.mark.parametrize("port", [True, 60.5])
def test_the_port_setting_must_be_a_name_or_an_integer(port: object) -> None:
    with pytest.raises(ValueError, match="port"):
        KubernetesSettings.model_validate({"selector": "app=engine", "port": port})


def test_a_pod_without_the_port_is_a_fault():
    said = fault(pod("a", "10.0.0.1"), Ports("other", "kv-replay", 1))
    assert said.startswith("port = other: the pod has no port of this name, only kv-events, kv-replay; if the pod is")
    said = fault(pod("a", "10.0.0.1", annotations={"kvbus/port": "x"}))
    assert said.startswith("annotation kvbus/port = x: the pod has no port of this name, only kv-events, kv-replay;")


# -- the watch ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeServer]:
    monkeypatch.setattr(kubernetes, "PAUSE", 0.01)
    async with KubeServer().running() as made:
        yield made


class DiscoveredSets:
    def __init__(self, at: KubeServer, directory: Path, /, **more: Any) -> None:
        given = {"selector": "app=engine", **at.settings(directory), **more}
        made = KubernetesDiscoverer(KubernetesSettings.model_validate(given), Services("w", 1, asyncio.Event()))
        self.sets = made.watch()

    async def next(self) -> set[str]:
        async with asyncio.timeout(60):
            return {engine.name for engine in await anext(self.sets)}


@contextlib.asynccontextmanager
async def watching(at: KubeServer, directory: Path, /, **more: Any) -> AsyncIterator[DiscoveredSets]:
    watched = DiscoveredSets(at, directory, **more)
    try:
        yield watched
    finally:
        await watched.sets.aclose()


async def test_kubernetes_discovery_gets_all_changes_by_one_watch(server, tmp_path):
    server.put(pod("a", "10.0.0.1"))
    async with watching(server, tmp_path) as watched:
        assert await watched.next() == {"a"}
        server.put(pod("b", None))
        server.put(pod("b", "10.0.0.2"))
        assert await watched.next() == {"a", "b"}
        server.put(pod("a", "10.0.0.1", deletionTimestamp="2026-11-22T12:00:00Z"))
        assert await watched.next() == {"b"}
        server.delete("a")
        server.delete("b")
        assert await watched.next() == set()
        assert (server.lists, len(server.watched_from)) == (1, 1)


async def test_a_new_watch_continues_after_the_last_bookmark(server, tmp_path):
    server.put(pod("a", "10.0.0.1"))
    async with watching(server, tmp_path) as watched:
        assert await watched.next() == {"a"}
        waiting = asyncio.create_task(watched.next())
        await eventually(lambda: server.watched_from, "a watch")
        server.bookmark(1000)
        version = str(server.version)
        await eventually(lambda: server.end_watches() or server.watched_from[-1] == version, "a watch from there on")
        server.put(pod("b", "10.0.0.2"))
        assert await waiting == {"a", "b"}
        assert server.lists == 1


@pytest.mark.parametrize("how", ["status", "event"])
async def test_kvbus_reads_a_new_list_if_its_watch_version_is_too_old(server, tmp_path, how):
    """If the API refuses the version from which a watch continues, kvbus reads a new list.

    A pod that was deleted in the meantime is missing from this list, so its engine leaves.
    """
    server.put(pod("a", "10.0.0.1"))
    server.put(pod("b", "10.0.0.2"))
    async with watching(server, tmp_path) as watched:
        assert await watched.next() == {"a", "b"}
        waiting = asyncio.create_task(watched.next())
        await eventually(lambda: server.watched_from, "a watch")
        server.objects.pop("a")
        if how == "event":
            server.error(410, "too old resource version")
        else:
            server.version += 1
            server.forget()
            server.end_watches()
        assert await waiting == {"b"}
        assert server.lists == 2


async def test_an_unexpected_error_in_a_watch_is_a_discovery_failure(server, tmp_path):
    async with watching(server, tmp_path) as watched:
        assert await watched.next() == set()
        waiting = asyncio.create_task(watched.next())
        await eventually(lambda: server.watched_from, "a watch")
        server.error(500, "etcdserver: request timed out")
        with pytest.raises(DiscoveryError, match="pods in default: etcdserver: request timed out"):
            await waiting


async def test_a_forbidden_list_is_reported_with_the_message_of_the_api(server, tmp_path):
    server.status = 403
    async with watching(server, tmp_path) as watched:
        with pytest.raises(DiscoveryError, match='pods in default: 403 pods is forbidden: User "kvbus" cannot list it'):
            await watched.next()


async def test_kubernetes_discovery_reports_a_missing_namespace_or_server(server, tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes, "OWN_NAMESPACE", tmp_path / "namespace")
    async with watching(server, tmp_path, namespace=None) as watched:
        with pytest.raises(DiscoveryError, match="not run in a pod, so the key namespace is needed"):
            await watched.next()
    (tmp_path / "namespace").write_text("default\n")
    async with watching(server, tmp_path, namespace=None) as watched:
        assert await watched.next() == set()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with watching(server, tmp_path, server=None) as watched:
        with pytest.raises(DiscoveryError, match="so the key server is needed: 'KUBERNETES_SERVICE_HOST'"):
            await watched.next()
    async with watching(server, tmp_path, token_file=str(tmp_path / "none")) as watched:
        with pytest.raises(DiscoveryError, match="none: No such file"):
            await watched.next()
    async with watching(server, tmp_path, ca_file=str(tmp_path / "none")) as watched:
        with pytest.raises(DiscoveryError, match="none: No such file"):
            await watched.next()
    async with watching(server, tmp_path, token_file=None) as watched:
        with pytest.raises(DiscoveryError, match="401 Unauthorized"):
            await watched.next()


DEFAULT_CONTEXT = ssl.create_default_context


def strict_tls_context(*args: Any, **kwargs: Any) -> ssl.SSLContext:
    """Return a TLS context as Python 3.13 and newer make it: it refuses certificate authorities such as Amazon
    EKS's.
    """
    context = DEFAULT_CONTEXT(*args, **kwargs)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


async def test_kvbus_in_a_pod_reads_the_service_account_token_for_each_request(tmp_path, monkeypatch):
    """In a pod, kvbus uses the pod's service account: it reads the token for each request, because the token changes.

    It checks the server's certificate against the cluster's authority.
    """
    authority = Authority(tmp_path)
    issued = authority.issue("kube-apiserver")
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(authority.certificate.read_bytes())
    (account / "token").write_text(TOKEN)
    monkeypatch.setattr(ssl, "create_default_context", strict_tls_context)
    monkeypatch.setattr(kubernetes, "ACCOUNT", account)
    monkeypatch.setattr(kubernetes, "PAUSE", 0.01)
    server = KubeServer()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    server.put(pod("a", "10.0.0.1"))
    in_the_pod = {"server": None, "token_file": None}
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.certificate, issued.key)
    async with server.running(context), watching(server, tmp_path, **in_the_pod) as watched:
        assert await watched.next() == {"a"}
        waiting = asyncio.create_task(watched.next())
        await eventually(lambda: server.watched_from, "a watch")
        server.token = "another"
        (account / "token").write_text("another\n")
        watches = len(server.watched_from)
        server.end_watches()
        await eventually(lambda: len(server.watched_from) > watches, "a watch with the other token")
        server.put(pod("b", "10.0.0.2"))
        assert await waiting == {"a", "b"}
        other = Authority(tmp_path, "other")
        (account / "ca.crt").write_bytes(other.certificate.read_bytes())
        async with watching(server, tmp_path, **in_the_pod) as mistrusting:
            with pytest.raises(DiscoveryError, match="certificate verify failed"):
                await mistrusting.next()


@pytest.mark.parametrize(
    "answer", [b"nonsense", b"[]", b'{"items": []}', b'{"items": [{}], "metadata": {"resourceVersion": "1"}}']
)
async def test_an_invalid_list_of_pods_is_a_discovery_failure(server, tmp_path, answer):
    server.answer = answer
    async with watching(server, tmp_path) as watched:
        with pytest.raises(DiscoveryError, match="pods in default"):
            await watched.next()
