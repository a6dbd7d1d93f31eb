"""Tests for discovery by DNS: names, TTLs, address families and failures, and workers that appear and leave."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvbus.parts.discovery.contract import DiscoveryError, Engine, Publisher, Services
from tests.discovery.fleet import DiscoveringBus, Worker, running
from tests.doubles.bus import eventually
from tests.ports import free_port, free_ports

dns = pytest.importorskip("dns", reason="the extra dns is not installed")

from dns import asyncquery, message  # noqa: E402

from tests.discovery.dns_server import DnsServer  # noqa: E402

NAME = "engines.test."


@pytest.fixture
async def server() -> AsyncIterator[DnsServer]:
    async with DnsServer().running() as made:
        yield made


def settings_of(server: DnsServer, **more: Any) -> dict[str, Any]:
    return {"name": NAME, "port": 5557, "servers": [server.address], "interval": 0.02, **more}


class DiscoveredSets:
    """The sets of engines that DNS discovery returns, one after the other."""

    def __init__(self, server: DnsServer, **more: Any) -> None:
        from kvbus.parts.discovery.dns import DnsDiscoverer, DnsSettings  # noqa: PLC0415 - an extra

        self.disconnected = asyncio.Event()
        settings = DnsSettings.model_validate(settings_of(server, **more))
        self.sets = DnsDiscoverer(settings, Services("workers", 1, self.disconnected)).watch()

    async def next(self) -> dict[str, Engine]:
        async with asyncio.timeout(60):
            return {engine.name: engine for engine in await anext(self.sets)}

    async def endpoints(self) -> list[str]:
        return [publisher.endpoint for engine in (await self.next()).values() for publisher in engine.publishers]


@contextlib.asynccontextmanager
async def watching(server: DnsServer, **more: Any) -> AsyncIterator[DiscoveredSets]:
    watched = DiscoveredSets(server, **more)
    try:
        yield watched
    finally:
        await watched.sets.aclose()


async def test_dns_discovery_names_each_engine_by_its_address(server):
    server.records = {(NAME, "A"): ["10.0.0.2", "10.0.0.1"], (NAME, "AAAA"): ["fd00::1"]}
    async with watching(server, replay_port=5558) as watched:
        found = await watched.next()
        assert list(found) == ["10.0.0.1", "10.0.0.2"]
        (publisher,) = found["10.0.0.2"].publishers
        assert (publisher.endpoint, publisher.replay_endpoint) == ("tcp://10.0.0.2:5557", "tcp://10.0.0.2:5558")


async def test_dns_discovery_finds_a_host_without_ipv4_by_ipv6(server):
    server.records = {(NAME, "AAAA"): ["fd00::1"]}
    async with watching(server) as watched:
        assert await watched.endpoints() == ["tcp://[fd00::1]:5557"]


async def test_dns_discovery_follows_an_srv_record_to_its_host(server):
    server.records = {(NAME, "A"): ["10.0.0.1"], ("alias.test.", "SRV"): [f"0 0 5557 {NAME}"]}
    async with watching(server, name="alias.test.", port=None) as watched:
        assert list(await watched.next()) == ["engines.test"]


async def test_dns_discovery_repeats_a_truncated_answer_over_tcp(server):
    addresses = [f"10.0.{n // 250}.{n % 250 + 1}" for n in range(300)]
    server.records, server.truncated = {(NAME, "A"): addresses}, True
    async with watching(server) as watched:
        assert len(await watched.endpoints()) == 300
    assert server.by_tcp == 1


async def test_dns_discovery_asks_again_after_the_ttl_or_a_lost_connection(server):
    server.records, server.ttl = {(NAME, "A"): ["10.0.0.1"]}, 200
    async with watching(server) as watched:
        await watched.next()
        asked = len(server.questions)
        waiting = asyncio.create_task(watched.next())
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        assert len(server.questions) == asked
        server.records = {(NAME, "A"): ["10.0.0.2"]}
        watched.disconnected.set()
        assert list(await waiting) == ["10.0.0.2"]


async def test_dns_discovery_waits_before_its_next_question_if_the_ttl_is_zero(server):
    server.records, server.ttl = {(NAME, "A"): ["10.0.0.1"]}, 0
    async with watching(server, interval=30.0) as watched:
        await watched.next()
        watched.disconnected.set()
        waiting = asyncio.create_task(watched.next())
        await asyncio.wait([waiting], timeout=0.3)
        assert len(server.questions) == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("rcode", ["SERVFAIL", "REFUSED", "FORMERR"])
async def test_a_dns_server_error_is_a_discovery_failure(server, rcode):
    server.rcode = dns.rcode.from_text(rcode)
    async with watching(server) as watched:
        with pytest.raises(DiscoveryError, match=r"A of engines\.test\."):
            await watched.next()


@pytest.mark.slow
async def test_a_silent_dns_server_is_a_discovery_failure(server):
    server.silent = True
    async with watching(server) as watched:
        with pytest.raises(DiscoveryError, match=r"A of engines\.test\."):
            await watched.next()


async def test_a_dns_name_that_does_not_exist_has_no_engine(server):
    async with watching(server) as watched:
        assert await watched.next() == {}
    async with watching(server, port=None) as watched:
        assert await watched.next() == {}


async def test_an_engine_stays_a_source_if_dns_fails_for_its_host(server):
    server.records = {
        (NAME, "SRV"): ["0 0 1 a.engines.test.", "0 0 2 b.engines.test."],
        ("a.engines.test.", "A"): ["10.0.0.1"],
    }
    honest = server.answer

    def answer(wire: bytes) -> Any:
        response = honest(wire)
        if response.question[0].name.to_text() == "b.engines.test.":
            response.set_rcode(dns.rcode.SERVFAIL)
        return response

    async with watching(server, port=None) as watched:
        server.answer = answer
        found = await watched.next()
    assert found["a"].publishers == (Publisher(0, "tcp://10.0.0.1:1"),)
    (problem,) = found["b"].faults
    assert str(problem).startswith("address = b.engines.test.: A of b.engines.test.: ")


async def test_each_host_of_srv_records_is_an_engine_and_each_port_a_rank(server):
    server.records = {
        (NAME, "SRV"): [
            "0 0 7001 a.engines.test.",
            "0 0 7000 a.engines.test.",
            "0 0 9 other.example.",
            "0 0 1 gone.test.",
        ],
        ("a.engines.test.", "A"): ["10.0.0.1"],
        ("other.example.", "A"): ["10.0.0.2"],
    }
    async with watching(server, port=None, replay_port=8000) as watched:
        found = await watched.next()
        assert list(found) == ["a", "other.example"]
        ranks = [(each.rank, each.endpoint, each.replay_endpoint) for each in found["a"].publishers]
        assert ranks == [
            (0, "tcp://10.0.0.1:7000", "tcp://10.0.0.1:8000"),
            (1, "tcp://10.0.0.1:7001", "tcp://10.0.0.1:8001"),
        ]


async def test_a_host_with_several_addresses_keeps_its_present_address(server):
    server.records = {(NAME, "SRV"): ["0 0 5557 a.test."], ("a.test.", "A"): ["10.0.0.5"]}
    async with watching(server, port=None) as watched:
        assert await watched.endpoints() == ["tcp://10.0.0.5:5557"]
        server.records["a.test.", "A"] = ["10.0.0.1", "10.0.0.5"]
        assert await watched.endpoints() == ["tcp://10.0.0.5:5557"]
        server.records["a.test.", "A"] = ["10.0.0.1"]
        assert await watched.endpoints() == ["tcp://10.0.0.1:5557"]


async def test_an_srv_record_with_the_target_dot_means_no_engine(server):
    server.records = {(NAME, "SRV"): ["0 0 0 ."]}
    async with watching(server, port=None) as watched:
        assert await watched.next() == {}


# -- workers under traffic -----------------------------------------------------------------------------------------------


class Dnsmasq:
    """A dnsmasq process that serves one name from a hosts file."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._hosts = directory / "hosts"
        self._hosts.touch()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            "dnsmasq", "--no-daemon", f"--port={self.port}", "--listen-address=127.0.0.1", "--bind-interfaces",
            "--no-resolv", "--no-hosts", "--user=", "--conf-file=/dev/null", "--pid-file=",
            f"--addn-hosts={self._hosts}", "--local=/test/", "--local-ttl=1",
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await self._until_it_answers()

    async def _until_it_answers(self) -> None:
        """Wait until dnsmasq answers. Before that, a SIGHUP would end it or be ignored."""
        question = message.make_query(NAME, "A")
        async with asyncio.timeout(60):
            while True:
                try:
                    await asyncquery.tcp(question, "127.0.0.1", port=self.port)
                except OSError:
                    await asyncio.sleep(0.01)
                else:
                    return

    def serve(self, addresses: Iterable[str]) -> None:
        self._hosts.write_text("".join(f"{address} engines.test\n" for address in addresses))
        self._process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        self._process.terminate()
        await self._process.wait()


def connections_to(workers: Iterable[Worker]) -> dict[str, set[str]]:
    """Return this process's sockets that are connected to each worker's publisher, from the kernel's tables."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    found: dict[str, set[str]] = {worker.name: set() for worker in workers}
    remote = {
        "".join(f"{int(byte):02X}" for byte in reversed(worker.host.split(".")))
        + f":{worker.ports[0]:04X}": worker.name
        for worker in workers
    }
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    for fields in map(str.split, lines):
        peer = fields[2][-13:]  # for IPv6: the IPv4 address in it
        if peer in remote and fields[3] == "01" and fields[9] in mine:
            found[remote[peer]].add(fields[9])
    return found


async def three_ten_two(bus: DiscoveringBus, workers: list[Worker], serve: Any) -> None:
    """Change the DNS entries from three workers to ten and then to two, under traffic.

    Check after each step that the router is exact, and that the workers that stay keep their connections.
    """
    serve(workers[:3])
    async with running(bus):
        await bus.sources(*(worker.name for worker in workers[:3]))
        stay = workers[:2]
        before = {worker.name: (bus.labels[worker.name], bus.source(worker.name)) for worker in stay}
        connected = connections_to(stay)
        assert all(connected.values())
        for step in (workers[:3], workers, stay):
            serve(step)
            await bus.sources(*(worker.name for worker in step))
            published = [worker.publisher.next_seq for worker in step]
            await eventually(
                lambda step=step, published=published: all(
                    worker.publisher.next_seq > seq + 20 for worker, seq in zip(step, published, strict=True)
                ),
                "traffic",
            )
            await bus.exact(*step)
            for worker in step:
                worker.go_on()
            assert {worker.name: (bus.labels[worker.name], bus.source(worker.name)) for worker in stay} == before
            assert connections_to(stay) == connected
            for worker in stay:
                source = bus.source(worker.name)
                stats = source.stats
                assert (
                    bus.clears(worker.name) == stats.gaps == stats.lost == stats.restarts == source.sequencer.epoch == 0
                )
        assert bus.stats.changes == {"joined": 10, "left": 8}
        assert bus.router.disconnected() == 0


@contextlib.asynccontextmanager
async def ten_workers() -> AsyncIterator[list[Worker]]:
    ports = free_ports(2)
    workers = [Worker(f"127.0.1.{n}", n, host=f"127.0.1.{n}", ports=ports) for n in range(1, 11)]
    for worker in workers:
        await worker.start()
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.stop()


async def test_dns_discovery_follows_three_then_ten_then_two_workers(server):
    def serve(workers: list[Worker]) -> None:
        server.records = {(NAME, "A"): [worker.host for worker in workers]}

    async with ten_workers() as workers:
        live, replay = workers[0].ports
        await three_ten_two(DiscoveringBus({"dns": settings_of(server, port=live, replay_port=replay)}), workers, serve)


@pytest.mark.skipif(shutil.which("dnsmasq") is None, reason="dnsmasq is not installed")
async def test_dns_discovery_follows_three_then_ten_then_two_workers_in_dnsmasq(tmp_path):
    dnsmasq = Dnsmasq(tmp_path)
    await dnsmasq.start()
    try:
        async with ten_workers() as workers:
            live, replay = workers[0].ports
            found = {"name": NAME, "port": live, "replay_port": replay, "servers": [f"127.0.0.1:{dnsmasq.port}"]}
            bus = DiscoveringBus({"dns": {**found, "interval": 0.1}})
            await three_ten_two(bus, workers, lambda step: dnsmasq.serve(worker.host for worker in step))
    finally:
        await dnsmasq.stop()


async def test_dns_discovery_finds_a_worker_that_returns_at_another_address(server):
    one = Worker("pod-1", 1, host="127.0.1.1")
    await one.start()

    def serve(worker: Worker) -> None:
        live, replay = worker.ports
        server.records = {
            ("_kv.engines.test.", "SRV"): [f"0 0 {live} pod-1.engines.test."],
            ("_replay.engines.test.", "SRV"): [f"0 0 {replay} pod-1.engines.test."],
            ("pod-1.engines.test.", "A"): [worker.host],
        }

    serve(one)
    server.ttl = 1000
    found = settings_of(server, name="_kv.engines.test.", replay_name="_replay.engines.test.", port=None)
    async with running(DiscoveringBus({"dns": found})) as bus:
        await bus.sources("pod-1")
        slot = bus.labels["pod-1"]
        await eventually(lambda: bus.source("pod-1").sequencer.next > 3, "some batches")
        again = Worker("pod-1", 2, host="127.0.1.2")
        await again.start()
        serve(again)
        await one.stop()  # kvbus resolves the name again, long before the TTL ends
        await eventually(lambda: bus.stats.changes["moved"], "the move")
        await bus.exact(again)
        assert bus.labels == {"pod-1": slot}
        await again.stop()
