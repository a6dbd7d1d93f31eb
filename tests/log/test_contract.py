"""Tests that every kind of log fulfils :mod:`kvbus.parts.log.contract`, with real servers.

How a log is created, trimmed and stopped is written in ``kinds.py``.
"""

import asyncio
import contextlib
import time

import pytest

from kvbus.parts.log.contract import START, Entry, FencedError, Pointer, UnavailableError
from kvbus.parts.log.record import RANDOM_BITS, Stream
from tests.log.kinds import insist
from tests.transport.loops import both_loops

ONE = Stream("eu", "meta/Llama-3.1", "10.0.0.7:8000", 0).key
TWO = Stream("eu", "meta/Llama-3.1", "10.0.0.7:8000", 1).key


class Session:
    """An empty log, and its writers and readers, which are closed at the end."""

    def __init__(self, kind, stack):
        self.kind = kind
        self._stack = stack

    async def claim(self, key=ONE):
        log = self.kind.open()
        writer = await insist(lambda: log.claim(key))
        self._stack.push_async_callback(writer.close)
        return writer

    async def pointers(self):
        return await self.kind.open().pointers()

    async def reader(self, **starts):
        reader = await self.kind.open().read({{"one": ONE, "two": TWO}[name]: at for name, at in starts.items()})
        self._stack.push_async_callback(reader.close)
        return reader


@contextlib.asynccontextmanager
async def session(kind):
    async with contextlib.AsyncExitStack() as stack:
        await kind.make()
        yield Session(kind, stack)


async def read_entries(reader, count):
    """Return the next ``count`` entries of a reader, even if the server is unavailable for some time."""
    found: list[Entry] = []
    async with asyncio.timeout(50):
        while len(found) < count:
            with contextlib.suppress(UnavailableError):
                found += await reader.take(1.0)
    return found


@both_loops
async def test_a_reader_gets_records_in_order_from_any_position(kind):
    async with session(kind) as log:
        one, two = await log.claim(ONE), await log.claim(TWO)
        await one.append([b"a", b"b"])
        await two.append([b"x"])
        await one.append([b"c"])
        last = await one.append([b"d" * 300_000, b"e"])
        entries = await read_entries(await log.reader(one=START), 5)
        assert [entry.data for entry in entries] == [b"a", b"b", b"c", b"d" * 300_000, b"e"]
        positions = [entry.position for entry in entries]
        assert positions == sorted(set(positions))
        assert (positions[-1], {entry.key for entry in entries}) == (last, {ONE})
        behind = await log.reader(one=positions[1] + 1, two=START)
        entries = await read_entries(behind, 4)
        assert sorted(entry.data[:1] for entry in entries) == [b"c", b"d", b"e", b"x"]
        await one.append([b"live"])
        assert [entry.data for entry in await read_entries(behind, 1)] == [b"live"]
        assert await behind.take(0.05) == []


async def test_a_record_has_the_time_at_which_the_log_received_it(kind):
    async with session(kind) as log:
        one, two = await log.claim(ONE), await log.claim(TWO)
        await one.append([b"before"])
        await asyncio.sleep(1.5)
        begun = time.monotonic()
        await two.append([b"behind"])
        await one.append([b"behind, too"])
        took = time.monotonic() - begun
        found = {entry.data: entry.time for entry in await read_entries(await log.reader(one=START, two=START), 3)}
        assert found[b"behind"] - found[b"before"] > 1.4
        assert -0.01 < found[b"behind, too"] - found[b"behind"] < took + 0.01


async def test_a_reader_detects_that_it_has_reached_the_end_of_the_log(kind):
    async with session(kind) as log:
        writer = await log.claim()
        await writer.append([b"a", b"b"])
        reader = await log.reader(one=START, two=START)
        assert await reader.reached(ONE) < (await reader.ends())[ONE]
        for more in ([], [b"c"]):
            if more:
                await writer.append(more)
            ends = await reader.ends()
            found = []
            async with asyncio.timeout(50):
                while await reader.reached(ONE) < ends[ONE] or await reader.reached(TWO) < ends[TWO]:
                    found += await reader.take(0.1)
            assert [entry.data for entry in found] == (more or [b"a", b"b"])


async def test_epochs_increase_and_the_next_writer_finds_the_pointer(kind):
    async with session(kind) as log:
        assert await log.pointers() == {}
        one, other = await log.claim(ONE), await log.claim(TWO)
        assert await log.pointers() == {ONE: Pointer(one.epoch), TWO: Pointer(other.epoch)}
        assert await log.kind.open().pointers(TWO) == {TWO: Pointer(other.epoch)}
        at = await one.append([b"state"])
        await one.point(Pointer(one.epoch, 7, at))
        assert (await log.pointers())[ONE] == Pointer(one.epoch, 7, at)
        again = await log.claim(ONE)
        assert again.epoch >> RANDOM_BITS > one.epoch >> RANDOM_BITS
        assert (await log.pointers())[ONE] == Pointer(again.epoch, -1, at)


async def test_a_fenced_writer_cannot_append_and_its_earlier_records_stay(kind):
    async with session(kind) as log:
        first = await log.claim()
        at = await first.append([b"first"])
        second = await log.claim()
        with pytest.raises(FencedError):
            await first.append([b"late"])
        with pytest.raises(FencedError):
            await first.point(Pointer(first.epoch, 0, at))
        await second.append([b"second"])
        with pytest.raises(FencedError):
            await first.append([b"later"])
        assert [entry.data for entry in await read_entries(await log.reader(one=START), 2)] == [b"first", b"second"]
        assert (await log.pointers())[ONE] == Pointer(second.epoch, -1, START)


async def test_one_of_two_writers_that_claim_a_stream_concurrently_is_fenced(kind):
    async with session(kind) as log:
        claims = await asyncio.gather(*(log.claim() for _ in range(2)), return_exceptions=True)
        writers = [each for each in claims if not isinstance(each, BaseException)]
        assert all(isinstance(each, FencedError) for each in claims if each not in writers)
        epochs = [writer.epoch for writer in writers]
        assert len(set(epochs)) == len(epochs) >= 1
        newest = max(writers, key=lambda writer: writer.epoch)
        for writer in writers:
            if writer is not newest:
                with pytest.raises(FencedError):
                    await writer.append([b"lost"])
        await newest.append([b"newest"])
        assert [entry.data for entry in await read_entries(await log.reader(one=START), 1)] == [b"newest"]


async def test_a_reader_overtaken_by_retention_continues_at_the_oldest_kept_record(kind):
    async with session(kind) as log:
        writer = await log.claim()
        positions = [await writer.append([b"%d" % n]) for n in range(6)]
        await kind.overtake(ONE, positions[3])
        entries = await read_entries(await log.reader(one=positions[1]), 3)
        assert [(entry.position, entry.data) for entry in entries] == [(positions[n], b"%d" % n) for n in (3, 4, 5)]


async def test_a_writer_detects_which_of_its_records_retention_deleted(kind):
    async with session(kind) as log:
        writer = await log.claim()
        positions = [await writer.append([b"%d" % n]) for n in range(4)]
        assert [await writer.keeps(at) for at in positions] == [True] * 4
        await kind.overtake(ONE, positions[2])
        assert [await writer.keeps(at) for at in positions] == [False, False, True, True]
        await writer.append([b"it goes on"])
        assert await writer.keeps(positions[3])


async def test_appended_records_survive_a_crash_of_the_server(kind):
    async with session(kind) as log:
        writer = await log.claim()
        at = await writer.append([b"a", b"b"])
        await writer.point(Pointer(writer.epoch, 0, at))
        reader = await log.reader(one=START)
        assert len(await read_entries(reader, 2)) == 2
        await kind.restart()
        assert await insist(log.pointers) == {ONE: Pointer(writer.epoch, 0, at)}
        await writer.append([b"c"])
        assert [entry.data for entry in await read_entries(reader, 1)] == [b"c"]
        second = await insist(log.claim)
        assert second.epoch > writer.epoch
        with pytest.raises(FencedError):
            await writer.append([b"d"])
        await second.append([b"e"])
        assert [entry.data for entry in await read_entries(await log.reader(one=START), 4)] == [b"a", b"b", b"c", b"e"]
