"""Tests for records of a later version of kvbus: which records this version reads, and how it handles all others.

`test_rolling` tests the replacement of a running version.
"""

import msgspec
import pytest

from kvbus.core.log_relay import EPOCH_BITS, LAST
from kvbus.parts.discovery.streams import LogStreams
from kvbus.parts.log.contract import Pointer, next_turn, read_pointer
from kvbus.parts.log.follower import LogStreamReader
from kvbus.parts.log.record import RANDOM_BITS, SCHEMA
from kvbus.tools.doctor.examine import find
from tests.doubles.bus import eventually
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Memory, insist
from tests.log.records import checked
from tests.log.test_aggregator import TOPIC, Aggregator, Two

LATER = checked(SCHEMA + 1, {"epoch": 2}, None)


async def write_later(log):
    """Take over the stream as a writer of a later version. Its pointer names a state that this version cannot read."""
    writer = await insist(lambda: log.kind.open().claim(KEY))
    at = await writer.append([LATER, LATER])
    await writer.point(Pointer(writer.epoch, 0, at))
    await writer.close()


@pytest.mark.parametrize("more", [[], ["later"], [{"a": 1}, None]])
def test_a_pointer_with_additional_fields_is_read_without_them(more):
    pointer = read_pointer(msgspec.msgpack.encode([3, 7, 900, *more]))
    turn = next_turn(pointer)
    assert (pointer, turn) == (Pointer(3, 7, 900), Pointer(turn.epoch, -1, 900))


async def test_a_stream_of_a_later_schema_is_given_up_until_a_downgrade(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("kvbus.parts.discovery.streams.LIST_SECONDS", 0.2)
    async with fleet(kind) as log, Two(kind, tmp_path, monkeypatch) as two:
        leaf = log.leaf()
        leaf.store(30)
        await two.level(leaf)
        await leaf.close()
        epoch = two.one.next[0] >> EPOCH_BITS
        await write_later(log)
        for each in (two.one, two.other):
            await eventually(
                lambda each=each: each.daemon.discovery_stats[0].records["other_schema"] == 2,
                "records of a later version",
            )
        assert two.router.blocks(TOPIC) == leaf.blocks, "as long as its writer may only be slow"
        monkeypatch.setattr(LogStreams, "give_up", 2.0)
        await eventually(lambda: two.router.blocks(TOPIC) == set(), "no block")
        await eventually(
            lambda: two.one.next == two.other.next == [(epoch << EPOCH_BITS | LAST) + 1], "the end's number"
        )
        await eventually(lambda: two.one.state == two.other.state == {}, "no source")
        monkeypatch.setattr(LogStreams, "give_up", 60.0)
        again = log.leaf()
        again.store(40)
        await two.level(again)
        assert two.one.next[0] >> EPOCH_BITS > epoch


async def test_an_aggregator_removes_a_source_without_a_readable_record(tmp_path, monkeypatch):
    """An aggregator removes a source if it cannot read any of the stream's records.

    To cause this, the test changes the stream's pointer after the aggregator has found the source, but before the
    source begins to read.
    """
    kind = Memory()
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(30)
        await leaf.written()
        await leaf.close()
        opened = []

        def late(relayed, begin=LogStreamReader.begin_again):
            opened.append(relayed)
            relayed.pointer = Pointer(relayed.pointer.epoch + (1 << RANDOM_BITS), 0, 10**9)
            begin(relayed)

        monkeypatch.setattr(LogStreamReader, "begin_again", late)
        aggregator = Aggregator(kind, tmp_path / "one", monkeypatch)
        await aggregator.daemon.start()
        try:
            await eventually(lambda: opened, "a source")
            monkeypatch.setattr(LogStreams, "give_up", 1.0)
            await eventually(lambda: not aggregator.state and aggregator.daemon.discovery_stats[0].engines == 0, "none")
            assert len(opened) == 1
        finally:
            await aggregator.daemon.close(0)


async def test_doctor_reports_records_of_a_later_version(tmp_path, monkeypatch):
    kind = Memory()
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(3)
        await leaf.written()
        await leaf.close()
        await write_later(log)
        aggregator = Aggregator(kind, tmp_path / "one", monkeypatch)
        _, report = await find(aggregator.config)
        texts = [str(each) for each in report.findings]
        assert any("fleet reads has 1 records of a schema that this version does not read" in text for text in texts), (
            texts
        )
        await aggregator.daemon.close(0)
