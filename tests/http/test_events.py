"""Tests for the event stream ``/events`` of kvbus's HTTP server.

They test its events, their order, its start positions, its access rules, and the cost of bad clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import msgspec
import pytest

from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored
from kvbus.http import connections, events
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.payloads import cleared, payload, removed, store
from tests.http.test_http import relayed, web, web_and_engine
from tests.typed import there


class Following:
    """The answer of ``/events`` to one client, read event by event."""

    def __init__(self, answer):
        self._answer = answer

    async def next(self, *names):
        """Return the next event with one of these names, or the next of any name: its name, data and id."""
        async with asyncio.timeout(60):
            while True:
                fields = {}
                while line := (await self._answer.content.readline()).decode():
                    if line == "\n":
                        break
                    name, _, value = line.rstrip("\n").partition(": ")
                    fields[name] = value
                assert line, "the answer has ended"
                if not names or fields["event"] in names:
                    return fields["event"], json.loads(fields["data"]), fields.get("id")

    async def ended(self):
        async with asyncio.timeout(60):
            while await self._answer.content.readany():
                pass
        return True


@contextlib.asynccontextmanager
async def following(client, query="", last_id=None):
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    async with client.get(f"/events{query}", headers) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"] == "text/event-stream"
        yield Following(answer)


async def test_events_begin_with_a_start_event_and_then_send_rates():
    async with web_and_engine() as (client, engine), following(client) as here:
        name, data, last_id = await here.next()
        assert (name, data) == ("start", {"resumed": None, "because": ""})
        assert last_id.partition("-")[0] == (await client.json("/overview"))["id"].partition("-")[0]
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([1, 2])))
        await relayed(client, 1)
        while True:
            _, rates, last_id = await here.next("rates")
            assert last_id is None  # a client can resume after transitions and batches, not after rates
            if rates["sources"]["engine"]["blocks"] == 2:
                break
        assert set(rates["sources"]["engine"]) == {"batches", "events", "blocks", "queue"}
        assert set(rates["outputs"]["routers"]) == {"batches", "bytes", "routers", "behind", "queue"}
        assert rates["all"]["blocks"] == 2
        _, after, _ = await here.next("rates")
        assert after["at"] - rates["at"] > 0.5


async def test_events_send_transitions_with_causes_and_resume_after_an_id():
    async with web() as client:
        async with following(client) as here:
            _, _, begun = await here.next("start")
        async with EnginePublisher(client.bus.engine, client.bus.engine_replay, bind=True):
            await eventually(lambda: client.bus.source.state == "live", "the engine found")
            async with following(client, last_id=begun) as here:
                assert (await here.next())[1] == {"resumed": True, "because": ""}
                seen: list[dict[str, Any]] = []
                while not seen or seen[-1]["after"] != "live":
                    _, data, last_id = await here.next("transition")
                    seen.append(data)
                assert [each["number"] for each in seen] == list(range(seen[0]["number"], seen[-1]["number"] + 1))
                assert {each["name"] for each in seen} == {"engine"}
                assert "in sync at seq -1 of epoch 0" in seen[-1]["text"]
            # The header Last-Event-ID, which a browser sends when it reconnects, is newer than the id in the address.
            async with following(client, f"?after={begun}", last_id) as here:
                assert (await here.next())[1]["resumed"] is True
                name, _, _ = await here.next("rates", "transition")
                assert name == "rates"


@pytest.mark.parametrize(
    ("last_id", "because"),
    [
        ("00000000-3", "of an earlier process"),
        ("nonsense", "is not valid"),
        ("PROCESS", "is not valid"),
        ("PROCESS-x", "is not valid"),
        ("PROCESS-1-a:b", "is not valid"),
        ("PROCESS-1-0:1:2", "is not valid"),
        ("PROCESS-" + "9" * 5000, "is not valid"),
        ("PROCESS-999999", "transitions are kept from"),
        ("PROCESS--2", "is not valid"),
    ],
)
async def test_events_with_an_unusable_id_start_now_and_give_the_reason(last_id, because):
    async with web() as client:
        now = (await client.json("/overview"))["id"]
        async with following(client, last_id=last_id.replace("PROCESS", now.partition("-")[0])) as here:
            _, data, given = await here.next("start")
            assert data["resumed"] is False
            assert because in data["because"]
            assert given.partition("-")[0] == now.partition("-")[0]


async def test_events_send_the_batches_of_an_output_with_hashes_as_strings():
    big = 6280583736533942967
    async with web_and_engine() as (client, engine), following(client, "?output=routers") as here:
        assert (await here.next())[0] == "start"
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([big, 2], lora_name="<b>"), removed([2])))
        engine.publish(payload(cleared()))
        _, first, _ = await here.next("batch")
        _, second, last_id = await here.next("batch")
        assert (first["output"], first["stream"], first["seq"], second["seq"]) == ("routers", 0, 0, 1)
        stored, gone = first["events"]
        assert stored["block_hashes"] == [str(big), "2"]
        assert (stored["type"], stored["parent_block_hash"], stored["lora_name"]) == ("BlockStored", None, "<b>")
        assert len(stored["token_ids"]) == 32
        assert (gone["type"], gone["block_hashes"]) == ("BlockRemoved", ["2"])
        assert second["events"] == [{"type": "AllBlocksCleared"}]
        assert last_id.endswith("-0:2")
        engine.publish(payload(store([7])))
        await relayed(client, 3)
        async with following(client, "?output=routers", last_id) as again:
            assert (await again.next())[1]["resumed"] is True
            assert (await again.next("batch"))[1]["events"][0]["block_hashes"] == ["7"]
        async with following(client, "?output=routers", last_id.replace("0:2", "1:2")) as other:
            assert "does not match the streams" in (await other.next())[1]["because"]
        async with following(client, "?output=routers", last_id.replace("0:2", "0:9")) as other:
            assert (await other.next())[1]["resumed"] is False


async def test_events_split_a_large_batch_and_send_its_id_with_the_last_part():
    async with web_and_engine() as (client, engine), following(client, "?output=routers") as here:
        await here.next("start")
        await engine.wait_for_subscriber(60)
        count = 5 * events.PART // 2
        engine.publish(payload(*(store([n]) for n in range(count))))
        engine.publish(payload(store([count])))
        seen: list[str] = []
        while len(seen) < count + 1:
            _, data, last_id = await here.next("batch")
            seen += [event["block_hashes"][0] for event in data["events"]]
            assert data["more"] is (len(seen) < count)
            assert data["seq"] == (len(seen) > count)
            # Only the last part of a batch has an id, so a client whose connection breaks before gets all parts again.
            assert (last_id is None) is data["more"]
            assert last_id is None or last_id.endswith(f"-0:{data['seq'] + 1}")
        assert seen == [str(n) for n in range(count + 1)]


async def test_events_name_batches_that_the_journal_no_longer_has():
    async with web_and_engine(output={"journal_batches": 3}) as (client, engine):
        await engine.wait_for_subscriber(60)
        async with following(client, "?output=routers") as here:
            _, _, begun = await here.next("start")
        for n in range(10):
            engine.publish(payload(store([n])))
        await relayed(client, 10)
        async with following(client, "?output=routers", begun) as here:
            _, missed, last_id = await here.next("missed")
            assert missed == {"what": "batches", "stream": 0, "from": 0, "to": 6}
            assert last_id.endswith("-0:7")
            assert [(await here.next("batch"))[1]["seq"] for _ in range(3)] == [7, 8, 9]


def test_an_event_id_of_too_many_streams_has_no_positions():
    listener = events.Listener(None)
    listener.number, listener.seqs = 3, dict.fromkeys(range(events.MAX_POSITIONS), 10**12)
    assert len(listener.id_in("process")) < 8000  # servers accept about this many bytes in a header
    listener.seqs[events.MAX_POSITIONS] = 0
    assert listener.id_in("process") == "process-3"


async def test_events_name_transitions_that_the_timeline_no_longer_has():
    async with web() as client, following(client) as here:
        await here.next("start")
        timeline = client.bus.daemon.admin.timeline
        begun = timeline.last
        for n in range(1500):
            timeline.add("remark", "engine", "over", f"number {n}")
        _, missed, _ = await here.next("missed")
        assert missed == {"what": "transitions", "from": begun + 1, "to": begun + 500}
        assert (await here.next("transition"))[1]["text"] == "number 500"


async def test_events_refuse_unknown_parameters_and_outputs_with_a_message():
    async with web() as client:
        status, text = await client.status("/events?blocks=1")
        assert (status, json.loads(text)["error"]) == (
            400,
            "/events has no parameter 'blocks'; it takes: after, output",
        )
        status, text = await client.status("/events?output=x")
        assert (status, json.loads(text)["error"]) == (404, "no output 'x'; the outputs are: routers")


async def test_events_send_batches_only_to_clients_that_may_read_content():
    async with web() as client:
        elsewhere = {"Host": "evil.example"}
        status, text = await client.status("/events?output=routers", headers=elsewhere)
        assert (status, "/events?output= shows token ids" in text) == (403, True)
        async with client.get("/events", elsewhere) as answer:
            assert answer.status == 200


async def test_events_limit_and_count_their_clients_and_release_closed_clients(monkeypatch):
    monkeypatch.setattr(events, "MAX_LISTENERS", 3)
    monkeypatch.setattr(events, "MAX_FOLLOWERS", 1)
    async with web() as client, contextlib.AsyncExitStack() as stack:
        process = client.bus.daemon.process
        for query in ("", "?output=routers"):
            await (await stack.enter_async_context(following(client, query))).next("start")
        status, text = await client.status("/events?output=routers")
        assert (status, "try again" in text) == (503, True)
        await (await stack.enter_async_context(following(client))).next("start")
        assert (await client.status("/events"))[0] == 503
        assert (await client.status("/events", "HEAD"))[0] == 405
        assert (await client.metrics())[("kvbus_http_listeners",)] == 3
        assert process.http_refused["busy"] == 2
        await stack.aclose()
        await eventually(lambda: process.http_listeners == 0, "the clients forgotten")


async def test_events_disconnect_and_count_a_client_that_does_not_read(monkeypatch):
    monkeypatch.setattr(connections, "TIMEOUT", 0.3)
    async with web_and_engine() as (client, engine):
        await engine.wait_for_subscriber(60)
        _, writer = await asyncio.open_connection(*there(client.bus.daemon.http_address), limit=2**10)
        writer.write(b"GET /events?output=routers HTTP/1.1\r\nHost: localhost\r\n\r\n")
        process, count = client.bus.daemon.process, 0
        await eventually(lambda: process.http_listeners == 1, "the client")
        while process.http_listeners:
            for _ in range(20):
                engine.publish(payload(store(list(range(count * 1000, count * 1000 + 1000)))))
                count += 1
            await relayed(client, count)
        assert process.http_closed["slow"] == 1
        assert await client.text("/livez") == "ok\n"
        writer.close()


async def test_the_end_of_kvbus_ends_event_streams_at_once():
    async with web() as client, following(client) as here:
        await here.next("start")
        closing = asyncio.create_task(client.bus.daemon.close(drain=0))
        assert await here.ended()
        await closing


def test_events_send_every_field_as_plain_json():
    raw = msgspec.Raw(msgspec.msgpack.encode(list(range(16))))
    stored: BlockStored = BlockStored((b"\x00\xff",), None, raw, 16, medium="CPU", group_idx=2)
    gone: BlockRemoved = BlockRemoved((1, 2**63), medium=None)
    said = list(events.batch_events(encode_batch([stored, gone, AllBlocksCleared()], 1.0, 0)))
    assert said == [
        {
            "type": "BlockStored",
            "block_hashes": ["00ff"],
            "parent_block_hash": None,
            "token_ids": list(range(16)),
            "block_size": 16,
            "lora_name": None,
            "medium": "CPU",
            "group_idx": 2,
        },
        {"type": "BlockRemoved", "block_hashes": ["1", str(2**63)], "medium": None},
        {"type": "AllBlocksCleared"},
    ]
    assert list(events.batch_events(b"\xc1")) == []
