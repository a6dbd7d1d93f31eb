"""Tests for unreadable data that one client wrote into a log: kvbus refuses, counts and logs it.

The other streams of the log stay readable.
"""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from kvbus.parts.discovery import streams
from kvbus.parts.log.contract import UNREADABLE_POINTER, Pointer, Refused, next_turn, take_pointer
from kvbus.parts.log.nats_reader import SHIFT, records_of
from kvbus.parts.outputs import appending
from tests.doubles.bus import eventually
from tests.doubles.socket_routers import TopicRouter
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Memory
from tests.log.poison import poisons
from tests.log.test_aggregator import TOPIC, Aggregator

HONEST = "m␟pod.honest/engine␟0".encode()
SERVED = b"kv@pod.honest.engine.0@m"


async def test_unreadable_data_in_a_log_harms_no_other_stream(kind, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(streams, "LIST_SECONDS", 0.01)
    looks, log_type = [], type(kind.open())
    look = log_type.pointers

    async def pointers(self, key=None):
        found = await look(self, key)
        looks.append(key)
        return found

    monkeypatch.setattr(log_type, "pointers", pointers)
    monkeypatch.setattr(appending, "LEASE_TTL", 1.0)
    monkeypatch.setattr(appending, "MOST_PAUSE", 0.5)
    caplog.set_level(logging.ERROR, "kvbus.discovery.streams")
    async with fleet(kind) as log:
        honest, poisoned = log.leaf(topic=HONEST), log.leaf()
        for leaf in (honest, poisoned):
            leaf.store(20)
            await leaf.written()
        first = Aggregator(kind, tmp_path / "first", monkeypatch)
        await first.daemon.start()
        router = TopicRouter(first.endpoint)
        try:
            await eventually(lambda: router.blocks(TOPIC) and router.blocks(SERVED), "both")
            async for what in poisons(kind, KEY):
                honest.store(2, gone=1)
                begun = looks.count(None)
                await eventually(lambda begun=begun: looks.count(None) > begun + 1, f"a look at {what}")
                await eventually(lambda: router.blocks(SERVED) == honest.blocks, f"the other stream behind {what}")
                assert not first.failing, what
            again = Aggregator(kind, tmp_path / "again", monkeypatch)
            await again.daemon.start()
            fresh = TopicRouter(again.endpoint)
            try:
                await eventually(lambda: not again.daemon.awaited, "it to be ready")
                assert again.held["pod.honest.engine.0"] == len(honest.blocks)
                await eventually(lambda: fresh.blocks(SERVED) == honest.blocks, "the other stream")
                assert fresh.violations == []
            finally:
                fresh.close()
                await again.daemon.close(0)
            assert [each for each in router.violations if SERVED.decode() in each] == []
            (stats,) = first.daemon.discovery_stats
            assert stats.failures == 0
            assert stats.records[UNREADABLE_POINTER]
            assert f"{KEY!r} has a pointer that cannot be read" in caplog.text
        finally:
            router.close()
            await first.daemon.close(0)


ODD = (
    "m␟pod/engine␟9999999999",
    "m␟\0/\n␟2147483648",
    f"m␟{'x' * 90}␟1",
    "m␟../..␟2",
    "m␟{source}/{rank}␟3",
    "␟␟4",
    "m␟é模🦙/engine␟5",
)
ALIKE = ("m␟pod.a/b␟0", "m␟pod/a.b␟0", "n␟pod/a.b␟0")


async def test_odd_stream_names_are_harmless_and_an_ambiguous_name_is_refused(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(streams, "LIST_SECONDS", 0.1)
    kind = Memory()
    async with fleet(kind) as log:
        leaves = [log.leaf(topic=topic.encode()) for topic in (*ODD, *ALIKE)]
        honest = log.leaf(topic=HONEST)
        for leaf in (*leaves, honest):
            leaf.store(5)
            await leaf.written()
        aggregator = Aggregator(kind, tmp_path / "one", monkeypatch)
        (stats,) = aggregator.daemon.discovery_stats
        await aggregator.daemon.start()
        router = TopicRouter(aggregator.endpoint)
        try:
            await eventually(lambda: not aggregator.daemon.awaited, "it to be ready")
            assert len(aggregator.state) == len(ODD) + 2
            assert set(aggregator.state.values()) == {"live"}
            assert set(aggregator.held.values()) == {5}
            await eventually(lambda: router.blocks(SERVED) == honest.blocks, "the honest one")
            await eventually(
                lambda: aggregator.daemon.discovery_stats[0].records["same_name"] == 2, "two to be refused"
            )
            assert "would be a source of the same name as another stream" in caplog.text
            assert stats.failures == 0
        finally:
            router.close()
            await aggregator.daemon.close(0)


FIELDS = st.binary(max_size=30) | st.integers().map(lambda number: b"%d" % number)


@given(st.binary(max_size=50) | st.lists(FIELDS, min_size=1, max_size=5), st.binary(max_size=30))
def test_any_pointer_data_is_a_valid_pointer_or_is_refused(value, name):
    found: dict[str, Pointer] = {}
    refused: Refused = Refused()
    take_pointer(found, refused, name, value)
    assert len(found) + len(refused) == bool(value)
    for pointer in found.values():
        assert next_turn(pointer).epoch > 0
        assert 0 <= pointer.position < 2**63
    assert all(reason == UNREADABLE_POINTER for reason, _ in refused)


@given(st.binary(max_size=50))
def test_any_nats_message_is_read_as_records(data):
    assert all(isinstance(record, bytes) for record in records_of(data))


def test_a_nats_message_with_too_many_records_counts_as_one_record():
    data = b"\xdc" + (2**SHIFT + 1).to_bytes(2, "big") + b"\xc4\0" * (2**SHIFT + 1)
    assert records_of(data) == [data]
