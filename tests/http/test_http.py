"""Tests for the HTTP endpoints of a running bus, also while engines fail. Requests do not disturb the stream."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbus.common.errors import BindError
from kvbus.core.types import Filtered, Reason, Refused
from kvbus.http import blocks as dumps_module
from kvbus.http import connections
from kvbus.telemetry.metrics import AT_ONCE, Exposition
from kvbus.telemetry.readings import LiveBlocks
from kvbus.telemetry.table import DROP_REASONS, EVENT_REASONS
from kvbus.transport.engine.publisher import EnginePublisher
from kvbus.transport.zmtp.reasons import DISCONNECTS, REFUSALS
from tests.doubles import replay_faults
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import cleared, removed, store, tokens_of
from tests.doubles.payloads import payload as batch
from tests.ports import free_port, free_ports, ports_in_a_row
from tests.typed import there

LARGE = 6280583736533942967
"""A block hash so large that JSON readers with double-precision numbers would change it."""


class Web:
    """A running kvbus, and an HTTP client that sends requests to it."""

    def __init__(self, bus, session):
        self.bus = bus
        self._session = session
        host, port = bus.daemon.http_address
        self.base = f"http://{host}:{port}"

    async def text(self, path):
        async with self._session.get(self.base + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.text()

    async def json(self, path):
        return json.loads(await self.text(path))

    async def blocks(self, query=""):
        return [json.loads(line) for line in (await self.text(f"/blocks{query}")).splitlines()]

    async def metrics(self):
        """Return every sample of kvbus's own metrics by name and labels."""
        found = {}
        for family in text_string_to_metric_families(await self.text("/metrics")):
            for sample in family.samples:
                key = (sample.name, *sorted(sample.labels.items()))
                assert key not in found, f"{key} twice in one scrape"
                found[key] = sample.value
        return found

    def get(self, path, headers=None):
        return self._session.get(self.base + path, headers=headers or {})

    async def status(self, path, method="GET", **more):
        async with self._session.request(method, self.base + path, **more) as answer:
            return answer.status, await answer.text()


@contextlib.asynccontextmanager
async def web(**settings):
    async with running_bus(**settings) as bus, aiohttp.ClientSession() as session:
        yield Web(bus, session)


@contextlib.asynccontextmanager
async def web_and_engine(**settings):
    async with (
        web(**settings) as client,
        EnginePublisher(client.bus.engine, client.bus.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: client.bus.source.state == "live", "the bus in sync with its engine")
        yield client, engine


async def relayed(client, count):
    await eventually(lambda: client.bus.source.sequencer.next == count, f"{count} batches relayed")


async def test_kvbus_stops_making_an_answer_for_a_disconnected_client(monkeypatch):
    ended = []

    def endless(_exposition):
        try:
            while True:
                yield
        finally:
            ended.append(True)

    async with web() as client:
        monkeypatch.setattr(Exposition, "read", endless)
        asking = asyncio.create_task(client.status("/metrics"))
        await eventually(lambda: client.bus.daemon.process.http_connections == 1, "the request")
        await client.text("/livez")
        assert not ended
        asking.cancel()
        await eventually(lambda: ended, "the end of the work")


# -- /sources


async def test_sources_shows_an_engine_before_and_after_it_connects():
    async with web() as client:
        (entry,) = await client.json("/sources")
        assert entry == {
            "name": "engine",
            "rank": 0,
            "endpoint": client.bus.engine,
            "replay_endpoint": client.bus.engine_replay,
            "state": "connecting",
            "found": None,
            "dialled_in": None,
            "partial": False,
            "partial_since": None,
            "epoch": 0,
            "last_seq": -1,
            "dialect": entry["dialect"],
            "unknown": [],
            "block_size": None,
            "queue_depth": 0,
            "unverified": 0,
            "counts": {
                "rejected": {},
                "filtered": {},
                **dict.fromkeys(
                    ("batches", "bytes", "stored", "removed", "cleared", "gaps", "missing", "recovered", "lost"), 0
                ),
                **dict.fromkeys(("pending", "duplicates", "restarts"), 0),
            },
            "examples": {},
            "blocks": {},
            "slot": 0,
        }
        async with EnginePublisher(client.bus.engine, client.bus.engine_replay, bind=True) as engine:
            await eventually(lambda: client.bus.source.state == "live", "the engine found")
            await engine.wait_for_subscriber(60)
            payloads = [
                batch(store([1, 2]), store([1], medium="CPU_PINNED")),
                batch(removed([1])),
                batch(removed([77])),
                b"\xc1",
            ]
            for payload in payloads:
                engine.publish(payload)
            await relayed(client, 4)
            (entry,) = await client.json("/sources")
            assert entry["state"] == "live"
            assert entry["last_seq"] == 3
            assert entry["block_size"] == 16
            assert isinstance(entry["dialect"], str)
            assert entry["blocks"] == {"GPU": 1, "CPU_PINNED": 1}
            counts = entry["counts"]
            assert (counts["batches"], counts["stored"], counts["removed"]) == (4, 2, 2)
            assert counts["bytes"] == sum(map(len, payloads))
            assert counts["rejected"] == {"not_msgpack": 1}
            assert counts["filtered"] == {"unknown_block": 1}


async def test_sources_shows_a_gap_during_a_replay_and_partial_after_trimmed_history(caplog):
    before = time.time()
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", buffer_steps=3) as engine:
        for n in range(10):  # the engine has run for a while, so its buffer has only the newest batches
            engine.publish(batch(store([n])))
        where = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
        async with web(replay_timeout=1.5, probe_interval=0, source=where) as client:
            await relayed(client, 10)
            (entry,) = await client.json("/sources")
            assert entry["partial"] is True
            assert entry["last_seq"] == 9
            assert entry["blocks"] == {"GPU": 3}
            assert entry["counts"]["missing"] == 0  # history that kvbus never saw does not count as missing
            await eventually(lambda: client.bus.daemon.findings, "the next look at the source")
            (finding,) = await client.json("/findings")
            assert (finding["kind"], finding["name"]) == ("source", "engine")
            assert finding["text"].startswith("partial: batches 0 to 6 were trimmed")
            assert finding["remedy"].startswith("the finding ends when the engine restarts, or its cache is reset")
            await eventually(lambda: client.bus.source.partial_since, "the time that it is partial from")
            (entry,) = await client.json("/sources")
            assert before <= entry["partial_since"] <= time.time()
            assert caplog.text.count("source engine: partial: batches 0 to 6 were trimmed") == 1
            await engine.wait_for_subscriber(60)
            engine.replay_fault = replay_faults.silent
            engine.publish(batch(store([10])), live=False)
            engine.publish(batch(store([11])))
            await eventually(lambda: client.bus.source.state == "gap", "the hole noticed")
            (entry,) = await client.json("/sources")
            assert entry["state"] == "gap"
            assert entry["queue_depth"] == 1
            assert (entry["counts"]["missing"], entry["counts"]["pending"]) == (1, 1)
            engine.send_again(10)
            await relayed(client, 12)
            await eventually(lambda: client.bus.source.state == "live", "the gap closed")
            (entry,) = await client.json("/sources")
            assert (entry["state"], entry["queue_depth"]) == ("live", 0)
            assert (entry["counts"]["missing"], entry["counts"]["recovered"]) == (1, 1)


async def test_sources_lists_every_rank_in_order():
    first = ports_in_a_row(3)
    sources = [
        {"name": "a", "endpoint": f"tcp://127.0.0.1:{first}", "data_parallel_size": 3},
        {"name": "b", "endpoint": "ipc:///tmp/kvbus-test-nobody-there"},
    ]
    out = [{"endpoint": f"tcp://127.0.0.1:{free_port()}", "layout": "merged"}]
    async with web(sources=sources, outputs=out) as client:
        entries = await client.json("/sources")
        assert [(e["name"], e["rank"]) for e in entries] == [("a/0", 0), ("a/1", 1), ("a/2", 2), ("b", 0)]
        assert [e["endpoint"].rpartition(":")[2] for e in entries[:3]] == [str(first + r) for r in range(3)]
        assert {e["replay_endpoint"] for e in entries} == {None}


async def test_sources_and_blocks_show_no_block_of_a_lost_source():
    async with web(source_timeout=0.2) as client:
        async with EnginePublisher(client.bus.engine, client.bus.engine_replay, bind=True) as engine:
            await eventually(lambda: client.bus.source.state == "live", "the engine found")
            await engine.wait_for_subscriber(60)
            engine.publish(batch(store([1, 2, 3])))
            await relayed(client, 1)
            assert len(await client.blocks()) == 3
        await eventually(lambda: client.bus.source.state == "lost", "the engine given up")
        (entry,) = await client.json("/sources")
        assert (entry["state"], entry["blocks"]) == ("lost", {})
        assert await client.blocks() == []
        samples = await client.metrics()
        assert samples["kvbus_blocks", ("medium", "GPU"), ("source", "engine")] == 0
        assert samples["kvbus_source_state", ("source", "engine"), ("state", "lost")] == 1
        assert samples["kvbus_source_timeouts_total", ("source", "engine")] == 1


# -- /blocks


async def test_blocks_shows_every_field_of_a_block():
    async with web_and_engine() as (client, engine):
        engine.publish(batch(store([1, 2], tokens=list(range(32))), store([3], 2, medium="CPU_PINNED"), store([1])))
        await relayed(client, 1)
        common = {"source": "engine", "rank": 0, "group_idx": None, "block_size": 16}
        assert await client.blocks() == [
            {**common, "hash": 1, "parent": None, "medium": "GPU", "token_ids": list(range(16)), "copies": 2},
            {**common, "hash": 2, "parent": 1, "medium": "GPU", "token_ids": list(range(16, 32)), "copies": 1},
            {**common, "hash": 3, "parent": 2, "medium": "CPU_PINNED", "token_ids": tokens_of(3), "copies": 1},
        ]
        assert await client.blocks("?source=engine") == await client.blocks()


async def test_blocks_shows_a_line_for_each_locality_and_owner_of_a_block():
    async with web_and_engine() as (client, engine):
        engine.publish(batch(store([1]), store([1], ownership="kvcr"), store([1], locality="LOCAL", ownership="kvcr")))
        await relayed(client, 1)
        names = [(line.get("locality"), line.get("ownership")) for line in await client.blocks()]
        assert names == [(None, None), (None, "kvcr"), ("LOCAL", "kvcr")]


async def test_blocks_shows_bytes_hashes_as_hex_and_the_group():
    one, two = b"\x00" * 31 + b"\x01", b"\xff" * 32
    async with web_and_engine() as (client, engine):
        spec = {"kv_cache_spec_kind": "full_attention"}
        engine.publish(batch(store([one], group=0, tokens=tokens_of(1), **spec)))
        engine.publish(batch(store([two], one, group=0, tokens=tokens_of(2), **spec)))
        await relayed(client, 2)
        blocks = await client.blocks()
        assert [(b["hash"], b["parent"], b["group_idx"]) for b in blocks] == [
            (one.hex(), None, 0),
            (two.hex(), one.hex(), 0),
        ]


async def test_blocks_shows_reblocked_blocks_as_routers_know_them():
    """`/blocks` shows the blocks that kvbus sends to routers, which may be smaller than the engine's.

    kvbus sends each block of 32 tokens as two blocks of 16. Two blocks of the engine with the same tokens and parent
    become one block with one hash.
    """
    async with web_and_engine(block_size=16) as (client, engine):
        tokens = list(range(64))
        engine.publish(batch(store([1], tokens=tokens[:32], block_size=32)))
        engine.publish(batch(store([2], 1, tokens=tokens[32:], block_size=32)))
        await relayed(client, 2)
        blocks = await client.blocks()
        assert [b["block_size"] for b in blocks] == [16] * 4
        assert [b["token_ids"] for b in blocks] == [tokens[at : at + 16] for at in range(0, 64, 16)]
        assert [b["parent"] for b in blocks] == [None, *(b["hash"] for b in blocks[:3])]
        router = client.bus.daemon.relay.outputs[0].streams[0].journal
        told = [
            name
            for at in range(len(router))
            for event in msgspec.msgpack.decode(router.at(at).payload)[1]
            for name in event["block_hashes"]
        ]
        assert [b["hash"] for b in blocks] == told


async def test_blocks_shows_one_source_and_refuses_an_unknown_source():
    ports = free_ports(2)
    engines = [{"name": f"e{n}", "endpoint": f"tcp://127.0.0.1:{port}"} for n, port in enumerate(ports)]
    out = [{"endpoint": f"tcp://127.0.0.1:{free_port()}", "layout": "merged"}]
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(web(sources=engines, outputs=out))
        for n, port in enumerate(ports):
            engine = await stack.enter_async_context(EnginePublisher(f"tcp://127.0.0.1:{port}", None, bind=True))
            await engine.wait_for_subscriber(60)
            engine.publish(batch(store([n + 1])))
        await eventually(lambda: all(s.sequencer.next for s in client.bus.daemon.relay.sources), "both relayed")
        assert [(b["source"], b["hash"]) for b in await client.blocks()] == [("e0", 1), ("e1", 2)]
        assert [(b["source"], b["hash"]) for b in await client.blocks("?source=e1")] == [("e1", 2)]
        status, text = await client.status("/blocks?source=e2")
        assert status == 404
        assert json.loads(text) == {"error": "no source 'e2'; the sources are: e0, e1"}
        assert (await client.status("/blocks?source="))[0] == 404
        for query, wrong in (
            ("hash=1", "has no parameter 'hash'; it takes: hashes, source"),
            ("source=engine&source=x", "/blocks takes each parameter once, and source is given several times"),
            ("source=engine&hashes=number&hashes=number", "and hashes is given several times"),
            ("hashes=text", "not one of number, string"),
        ):
            status, text = await client.status(f"/blocks?{query}")
            assert (status, wrong in text) == (400, True)


@pytest.mark.parametrize(("query", "name"), [("", LARGE), ("?hashes=number", LARGE), ("?hashes=string", str(LARGE))])
async def test_blocks_shows_hashes_as_numbers_or_on_request_as_strings(query, name):
    async with web_and_engine() as (client, engine):
        engine.publish(batch(store([LARGE, 2], tokens=tokens_of(1) * 2)))
        await relayed(client, 1)
        first, second = await client.blocks(query)
        assert (first["hash"], first["parent"], second["parent"]) == (name, None, name)


async def test_a_slowly_read_dump_shows_the_blocks_of_one_moment():
    """A dump of blocks does not change while it is read, although the engine publishes more batches."""
    async with web_and_engine() as (client, engine):
        count = 40_000
        for first in range(0, count, 1000):
            engine.publish(batch(store(list(range(first, first + 1000)), tokens=[7] * 1000, block_size=1)))
        await relayed(client, count // 1000)
        reader, writer = await asyncio.open_connection(*there(client.bus.daemon.http_address), limit=2**12)
        writer.write(b"GET /blocks HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"chunked" in head.lower()  # the answer begins before all of it is ready
        begin = await reader.readline()
        assert begin
        # The client stops reading, so the answer waits in the middle. The stream and other requests continue.
        engine.publish(batch(cleared()))
        await relayed(client, count // 1000 + 1)
        assert (await client.json("/sources"))[0]["blocks"] == {}
        assert await client.blocks() == []
        rest = await reader.read()
        body = begin + rest
        assert body.count(b'"copies"') == count
        writer.close()
        await writer.wait_closed()


async def more_than_sockets_hold(client, engine):
    """Publish 60,000 blocks. An answer of `/blocks` with all of them exceeds the socket buffers, so it waits for its
    reader.
    """
    for first in range(0, 60_000, 1000):
        engine.publish(batch(store(list(range(first, first + 1000)), tokens=[70_000] * 1000, block_size=1)))
    await relayed(client, 60)


async def test_kvbus_breaks_off_a_dump_that_its_client_does_not_read(monkeypatch):
    """kvbus breaks off a dump of blocks that its client does not read, so that another dump can begin.

    The client can see that the answer is incomplete.
    """
    async with web_and_engine() as (client, engine):
        await more_than_sockets_hold(client, engine)
        monkeypatch.setattr(connections, "TIMEOUT", 0.1)
        reader, writer = await asyncio.open_connection(*there(client.bus.daemon.http_address), limit=2**12)
        writer.write(b"GET /blocks HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await eventually(lambda: client.bus.daemon.process.http_dumps == 0, "the end of a dump that nobody reads")
        # The last chunk is missing, so a client sees that the answer is incomplete.
        assert not (await reader.read()).endswith(b"\r\n0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        monkeypatch.undo()
        assert len(await client.blocks()) == 60_000


async def test_kvbus_relays_batches_and_answers_requests_during_a_dump(monkeypatch):
    """During a dump of blocks, kvbus still relays batches and answers other requests.

    It does so between two parts of the dump, because kvbus sends only one part in an iteration of the event loop.
    """
    async with web_and_engine() as (client, engine):
        count = 20_000
        engine.publish(batch(store(list(range(count)), tokens=[7] * count, block_size=1)))
        await relayed(client, 1)
        parts, turns = Counter[Any](), Counter[Any]()
        lines = LiveBlocks.lines

        def counted(cut, hashes):
            for line in lines(cut, hashes):
                parts["lines"] += 1
                parts["this turn"] += 1
                parts["most in a turn"] = max(parts["most in a turn"], parts["this turn"])
                yield line

        monkeypatch.setattr(LiveBlocks, "lines", counted)
        dumps = [asyncio.create_task(client.blocks()) for _ in range(2)]
        while not all(dump.done() for dump in dumps):
            parts["this turn"] = 0
            turns["all"] += 1
            await asyncio.sleep(0)
        assert [len(await dump) for dump in dumps] == [count, count]
        assert parts["lines"] == 2 * count
        assert parts["most in a turn"] <= 2 * dumps_module.LINES
        assert turns["all"] >= count // dumps_module.LINES


async def test_kvbus_refuses_a_dump_beyond_the_maximum_of_open_dumps():
    async with web_and_engine() as (client, engine):
        await more_than_sockets_hold(client, engine)
        writers = []
        for _ in range(dumps_module.MAX_DUMPS):
            reader, writer = await asyncio.open_connection(*there(client.bus.daemon.http_address), limit=2**12)
            writers.append(writer)
            writer.write(b"GET /blocks HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
        status, text = await client.status("/blocks")
        assert status == 503
        assert "try again" in text
        for writer in writers:
            writer.close()
        await eventually(lambda: client.bus.daemon.process.http_dumps == 0, "the dumps of clients that left are over")
        assert len(await client.blocks()) == 60_000


# -- /metrics


async def test_metrics_of_many_sources_are_read_in_slices_and_described_once():
    more = [{"name": f"e{n}", "endpoint": f"tcp://127.0.0.1:{port}"} for n, port in enumerate(free_ports(9))]
    async with running_bus(more_sources=more, output={"layout": "merged"}) as bus:
        exposition = Exposition(bus.daemon)
        steps = 0

        def counted():
            nonlocal steps
            work = exposition.read()
            while True:
                try:
                    next(work)
                except StopIteration as end:
                    return end.value
                steps += 1

        lines = exposition.render(counted()).decode().splitlines()
    assert steps >= 10 // AT_ONCE
    described = [line for line in lines if line.startswith("# TYPE")]
    assert len(described) == len(set(described))
    samples = [line for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    assert sum(line.startswith("kvbus_events_rejected_total{") for line in samples) == 10 * len(Reason)


async def test_metrics_show_every_label_value_as_zero_after_the_start():
    async with web() as client:
        samples = await client.metrics()

        def children(name, label):
            return {dict(key[1:])[label]: value for key, value in samples.items() if key[0] == name}

        assert children("kvbus_events_rejected_total", "reason") == dict.fromkeys(map(str, Reason), 0)
        assert children("kvbus_events_filtered_total", "reason") == dict.fromkeys(map(str, Filtered), 0)
        kinds = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
        assert children("kvbus_source_events_total", "type") == dict.fromkeys(kinds, 0)
        assert children("kvbus_output_dropped_batches_total", "reason") == dict.fromkeys(DROP_REASONS, 0)
        assert children("kvbus_output_dropped_events_total", "reason") == dict.fromkeys(EVENT_REASONS, 0)
        outcomes = (
            "complete",
            "compacted",
            "late",
            "subscription",
            "gone",
            "stalled",
            "refused",
            "malformed",
            "cut_off",
        )
        assert children("kvbus_replay_requests_total", "outcome") == dict.fromkeys(outcomes, 0)
        assert children("kvbus_source_handshakes_failed_total", "reason") == dict.fromkeys(map(str, Refused), 0)
        assert children("kvbus_output_handshakes_failed_total", "reason") == dict.fromkeys(map(str, REFUSALS), 0)
        disconnects = children("kvbus_output_router_disconnects_total", "reason")
        assert disconnects == dict.fromkeys(map(str, DISCONNECTS), 0)
        assert children("kvbus_output_states_sent_total", "reason") == {
            "subscribed": 0,
            "lost": 0,
            "asked": 0,
            "refreshed": 0,
            "trimmed": 0,
        }
        for name in ("kvbus_config_reloads_total", "kvbus_key_reloads_total"):
            assert children(name, "outcome") == {"applied": 0, "refused": 0}
        states = children("kvbus_source_state", "state")
        assert states == {"connecting": 1, "syncing": 0, "live": 0, "gap": 0, "lost": 0, "conflict": 0}
        assert children("kvbus_blocks", "medium") == {"GPU": 0}
        assert children("kvbus_output_sequence", "stream") == {"0": -1}


async def test_metrics_have_cumulative_histograms_with_consistent_sums():
    async with web_and_engine() as (client, engine):
        for n in range(50):
            engine.publish(batch(store([n])))
        await relayed(client, 50)
        text = await client.text("/metrics")
        (family,) = [f for f in text_string_to_metric_families(text) if f.name == "kvbus_relay_latency_seconds"]
        buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
        bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
        assert bounds == sorted(bounds)
        assert buckets == sorted(buckets)
        (count,) = [s.value for s in family.samples if s.name.endswith("_count")]
        (total,) = [s.value for s in family.samples if s.name.endswith("_sum")]
        assert buckets[-1] == count
        assert 0 < count <= 50, "kvbus observes once for all batches of one read"
        assert total > 0


# -- the rest


async def test_livez_and_readyz_answer_ok():
    async with web() as client:
        assert await client.text("/livez") == "ok\n"
        assert await client.text("/readyz") == "ok\n"


@pytest.mark.parametrize(
    "path",
    ["/", "/page.js", "/metrics", "/livez", "/readyz", "/sources", "/routers", "/findings", "/overview", "/blocks"],
)
async def test_http_paths_refuse_methods_that_write(path):
    async with web() as client:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await client.status(path, method, data=b"x" * 1000))[0] == 405
        assert (await client.status(path, "HEAD"))[0] == 200
        assert (await client.status(path + "nothing"))[0] == 404


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /blocks?source=" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL",
    ],
)
async def test_kvbus_refuses_invalid_http_bytes_and_continues(garbage):
    async with web() as client:
        reader, writer = await asyncio.open_connection(*there(client.bus.daemon.http_address))
        with contextlib.suppress(ConnectionError):
            writer.write(garbage)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 60)
            assert answer.startswith(b"HTTP/1.") is bool(answer)
            assert answer[9:12] in (b"400", b"")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert await client.text("/livez") == "ok\n"


async def test_kvbus_names_a_used_http_address():
    async with web() as client:
        host, port = client.bus.daemon.http_address
        with pytest.raises(BindError, match=rf"http {host}:{port}"):
            async with running_bus(http=f"{host}:{port}"):
                raise AssertionError("two servers on one address")


async def test_kvbus_has_no_http_server_if_http_is_null():
    async with running_bus(http=None) as bus:
        assert bus.daemon.http_address is None


@pytest.mark.parametrize("query", ["nonsense=1", "nonsense", "source=engine&nonsense="])
async def test_every_http_path_refuses_an_unknown_parameter(query: str) -> None:
    async with web() as client:
        for path, known in client.bus.daemon.admin.paths.items():
            for method in known.methods:
                status, text = await client.status(f"{path}?{query}", method)
                assert status == 400, f"{method} {path}"
                assert method == "HEAD" or "has no parameter" in json.loads(text)["error"]


async def test_the_status_pages_requests_get_json_and_unknown_names_an_error():
    async with web() as client:
        overview = await client.json("/overview")
        assert {"version", "config", "state_writing", "started", "now", "content", "id"} < set(overview)
        await eventually(lambda: "engine" in client.bus.daemon.admin.history.sources, "a sample")
        for _ in ("sampled", "come since the last sample"):
            assert set(await client.json("/history?source=engine")) == {"times", "batches", "events", "blocks", "queue"}
            client.bus.daemon.admin.history.sources = {}
        assert (await client.status("/history?source=x"))[0] == 404
        assert (await client.status("/events?output=x"))[0] == 404
        assert (await client.status("/events?output=routers", headers={"Host": "evil.example"}))[0] == 403
        async with client.get("/events?output=routers") as answer:
            assert (await answer.content.readline()) == b"retry: 1000\n"
