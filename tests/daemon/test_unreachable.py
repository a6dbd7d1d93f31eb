"""Tests that kvbus logs why a source has no connection, and logs each change of the reason.

After a connection it logs no reason any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from kvbus.core.findings.finding import Severity
from kvbus.core.findings.source import source_findings
from kvbus.daemon import unreachable
from kvbus.transport import reach
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import payload, store
from tests.ports import ports_in_a_row


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreachable, "AFTER", 0.1)
    monkeypatch.setattr(reach, "LONGEST_PAUSE", 0.2)


@pytest.fixture
def xpub() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.XPUB) as made:
        made.linger = 0
        yield made


def findings_of(bus) -> list[str]:
    return [each.text for each in source_findings(bus.source)]


class Ssh(asyncio.Protocol):
    """A server that, like SSH, sends a greeting and then waits."""

    def __init__(self, opened: list[asyncio.Transport]) -> None:
        self._opened = opened

    def connection_made(self, transport) -> None:
        self._opened.append(transport)
        transport.write(b"SSH-2.0-OpenSSH_9.6\r\n")


async def test_the_finding_names_the_present_reason_of_a_failed_connection():
    async with running_bus() as bus:
        nothing = [f"nothing listens at {bus.engine} (connection refused)"]
        await eventually(lambda: findings_of(bus) == nothing, "nothing listens")
        opened: list[asyncio.Transport] = []
        port = int(bus.engine.rpartition(":")[2])
        server = await asyncio.get_running_loop().create_server(lambda: Ssh(opened), "127.0.0.1", port)
        stranger = [f"{bus.engine} does not speak ZeroMQ (an SSH server)"]
        await eventually(lambda: findings_of(bus) == stranger, "a stranger listens")
        server.close()
        for transport in opened:
            transport.abort()
        await eventually(lambda: findings_of(bus) == nothing, "nothing listens again")
        async with EnginePublisher(bus.engine, bus.engine_replay, bind=True):
            await eventually(lambda: bus.source.state == "live" and not findings_of(bus), "the engine is there")
        await eventually(lambda: findings_of(bus) == nothing, "the engine is gone")


async def test_a_finding_reports_swapped_ports_of_an_engine():
    async with running_bus() as bus, EnginePublisher(bus.engine_replay, bus.engine, bind=True):
        wrong = (
            f"endpoint and replay_endpoint are swapped: {bus.engine} answers replays and {bus.engine_replay} publishes"
        )
        await eventually(lambda: wrong in findings_of(bus), "the replay is at the live endpoint")
        (finding, *_) = source_findings(bus.source)
        assert (finding.key, finding.remedy) == (
            "sources[0].endpoint",
            "exchange the values of endpoint and replay_endpoint",
        )


async def test_a_finding_reports_that_no_engine_has_dialled_in():
    async with running_bus(bind=True) as bus:
        nobody = [f"no engine has dialled in at {bus.engine}"]
        await eventually(lambda: findings_of(bus) == nobody, "nobody dials")


async def test_a_connected_engine_gets_no_diagnostic_connection():
    async with running_bus() as bus, EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine:
        await eventually(lambda: bus.source.state == "live", "the engine is there")
        looked = bus.daemon.process.loop_lag.counts
        ticks = sum(looked)
        await eventually(lambda: sum(looked) > ticks + 5, "ticks")
        await engine.wait_for_subscriber(60)
        assert findings_of(bus) == []


@pytest.mark.parametrize(("rank", "found"), [(1, ["more_ranks_perhaps"]), (0, []), (None, [])])
async def test_a_publisher_at_the_next_port_is_a_further_rank_only_by_its_rank(
    rank: int | None, found: list[str], xpub: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreachable, "FURTHER_AFTER", 0.1)
    port = ports_in_a_row(2)
    engine, beyond = (f"tcp://127.0.0.1:{each}" for each in (port, port + 1))
    xpub.bind(beyond)
    said_by_peers: list[bytes] = []

    def heard(what: bytes) -> bool:
        while xpub.poll(0):
            said_by_peers.append(xpub.recv())
        return what in said_by_peers

    async with running_bus(source={"endpoint": engine, "replay_endpoint": None}) as bus:
        async with EnginePublisher(engine, None, bind=True):
            await eventually(lambda: heard(b"\x01"), "kvbus listens there")
            xpub.send_multipart([b"", bytes(8), payload(store([1]), rank=rank)])
            await eventually(lambda: heard(b"\x00"), "kvbus has listened")
            await eventually(lambda: [each.id for each in source_findings(bus.source)] == found, "the finding")
            assert {each.severity for each in source_findings(bus.source)} <= {Severity.NOTE}
            assert bus.source.state == "live"
        await eventually(lambda: bus.source.state == "connecting", "the engine is gone")
        assert bus.source.further_rank is None


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "another rank"])
async def test_the_finding_about_a_further_rank_ends_with_its_batches(
    gone: bool, xpub: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreachable, "FURTHER_AFTER", 0.1)
    port = ports_in_a_row(2)
    engine, beyond = (f"tcp://127.0.0.1:{each}" for each in (port, port + 1))
    xpub.bind(beyond)

    def publishes(rank: int) -> bool:
        xpub.send_multipart([b"", bytes(8), payload(store([1]), rank=rank)])
        return True

    async with (
        running_bus(source={"endpoint": engine, "replay_endpoint": None}) as bus,
        EnginePublisher(engine, None, bind=True),
    ):
        await eventually(lambda: publishes(1) and bus.source.further_rank is not None, "the note")
        if gone:
            xpub.unbind(beyond)
        await eventually(lambda: (gone or publishes(0)) and bus.source.further_rank is None, "the end of it")
        assert bus.source.state == "live"
