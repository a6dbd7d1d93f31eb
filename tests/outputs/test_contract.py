"""Tests that every output type fulfils :mod:`kvbus.parts.outputs.contract`, with its real readers.

A new output type must pass this file unchanged. It needs only an entry in ``readers.py`` for its readers.
"""

import contextlib
import resource

import pytest

from kvbus.common.errors import BindError
from kvbus.core.stats import OutputStats
from kvbus.transport.sockets import PLAIN
from tests.doubles.bus import eventually
from tests.outputs.driven import TOPIC
from tests.transport.loops import both_loops


class BatchCollector:
    """All batches that a reader has received so far, from several calls of its `take`."""

    def __init__(self, reader):
        self.batches = []
        self._reader = reader

    def more(self):
        self.batches.extend(self._reader.take())
        return self.batches

    async def all_of(self, expected):
        await eventually(lambda: len(self.more()) >= len(expected), f"{len(expected)} batches")
        assert self.batches == expected


# -- the live stream --------------------------------------------------------------------------------------------------


@both_loops
async def test_every_batch_arrives_in_order_at_every_reader(output):
    async with output() as driven:
        readers = [BatchCollector(await driven.reader()) for _ in range(2)]
        driven.publish(1200, events=3)
        assert (driven.stats.queue_depth, driven.stats.queue_limit) == (1200, 10_000)
        driven.driver.flush()
        driven.send(1)
        for reader in readers:
            await reader.all_of(driven.sent[0])
        stats = driven.stats
        sent = sum(len(payload) for *_, payload in driven.sent[0])
        assert (stats.batches, stats.events, stats.bytes, stats.queue_depth) == (1201, 3601, sent, 0)
        assert not driven.dropped


@both_loops
async def test_a_stalled_reader_delays_no_other_reader_and_its_losses_are_counted(output):
    async with output(send_hwm=50) as driven:
        healthy, stalled = BatchCollector(await driven.reader()), BatchCollector(await driven.reader(slow=True))
        for _ in range(100):
            driven.send(10, size=20_000)
            await eventually(lambda: len(healthy.more()) == len(driven.sent[0]), "the healthy reader's next batches")
        assert healthy.batches == driven.sent[0]
        during = len(driven.sent[0])
        waits = driven.kind.seen
        assert bool(driven.driver.queue_max) == bool(driven.driver.behind_seconds) == waits
        assert driven.driver.queue_max <= 50

        def caught_up():
            driven.send(1)
            return stalled.more() and stalled.batches[-1][1] >= during

        await eventually(caught_up, "a batch from after the stall")
        seqs = [seq for _, seq, _ in stalled.batches]
        assert seqs == sorted(set(seqs))
        assert set(stalled.batches) <= set(driven.sent[0])
        lost = during - sum(seq < during for seq in seqs)
        assert bool(lost) == bool(driven.dropped) == driven.kind.loses
        assert set(driven.stats.dropped_events) == set(driven.stats.dropped_batches)


@both_loops
async def test_batches_beyond_the_queue_limit_are_dropped_and_counted(output):
    async with output(queue_batches=10) as driven:
        reader = BatchCollector(await driven.reader())
        driven.publish(25, events=4)  # the event loop does not run in between
        stats = driven.stats
        assert stats.queue_depth <= stats.queue_limit == 10
        dropped = 25 - stats.queue_depth - stats.batches
        assert dropped <= 15
        assert stats.dropped_batches == {"queue_full": dropped}
        assert stats.dropped_events == {"queue_full": 4 * dropped}
        driven.driver.flush()
        await eventually(lambda: len(reader.more()) == 25 - dropped, "those that fit")
        driven.send(1)
        await reader.all_of([*driven.sent[0][: 25 - dropped], driven.sent[0][-1]])


def outcomes(stats):
    return {outcome: count for outcome, count in stats.replay_requests.items() if count}


# -- replays ----------------------------------------------------------------------------------------------------------


@both_loops
async def test_the_answer_to_a_replay_request_arrives_completely(asked_output):
    async with asked_output(opened=2) as driven:
        readers = [await driven.reader(stream) for stream in (0, 1)]
        for stream in (0, 1):
            driven.send(50, stream)
        readers[1].ask(0)
        await eventually(readers[1].answers, "the END")
        readers[0].ask(40)
        readers[1].ask(50)
        await eventually(lambda: readers[0].answers() and len(readers[1].answers()) == 2, "the other two")
        assert readers[0].answers() == [driven.sent[0][40:]]
        assert readers[1].answers() == [driven.sent[1], []]
        assert sorted((event.output, event.stream) for event in driven.fed) == [(0, 0), (0, 1), (0, 1)]
        # The reader may have the complete answer before the driver has noticed that the kernel took all of it.
        await eventually(lambda: driven.driver.busy == 0, "the last answer's place given back")
        assert driven.driver.end_answers() == 0
        assert outcomes(driven.stats) == {"complete": 3}


@both_loops
async def test_a_reader_gets_end_for_each_answer_that_is_cut_off(asked_output):
    async with asked_output(sessions=1) as driven:
        driven.send(1000, size=20_000)
        await eventually(lambda: driven.stats.batches == 1000, "the live ones")
        slow = await driven.reader(slow=True)
        slow.ask(0)
        await eventually(lambda: driven.driver.busy == 1, "the one that is answered")
        slow.ask(0)
        slow.ask(500)
        await eventually(lambda: driven.driver.busy == 3, "those that wait for it")
        assert driven.driver.end_answers() == 3
        assert driven.driver.busy == 0
        assert outcomes(driven.stats) == {"cut_off": 3}
        await eventually(lambda: len(slow.answers()) == 3, "an END for each request")
        begun, *others = slow.answers()
        assert len(begun) < 1000
        assert begun == driven.sent[0][: len(begun)]
        assert others == [[], []]


@both_loops
async def test_reopening_an_output_ends_and_counts_its_unfinished_answers(asked_output):
    async with asked_output() as driven:
        driven.send(1000, size=20_000)
        await eventually(lambda: driven.stats.batches == 1000, "the live ones")
        slow = await driven.reader(slow=True)
        slow.ask(0)
        await eventually(lambda: driven.driver.busy == 1, "the answer under way")
        driven.driver.reopen(PLAIN)
        assert driven.driver.busy == 0
        assert outcomes(driven.stats) == {"gone": 1}
        again = await driven.reader()
        again.ask(0)
        await eventually(again.answers, "the END")
        assert again.answers() == [driven.sent[0]]


# -- who reads ---------------------------------------------------------------------------------------------------------


@both_loops
async def test_a_reader_is_shown_from_its_connection_to_its_disconnection(output):
    async with output(opened=2) as driven:
        readers = [await driven.reader(stream) for stream in (0, 0, 1)]
        driver, stats = driven.driver, driven.stats
        seen = driven.kind.seen
        assert sorted(view.stream for view in driver.routers) == ([0, 0, 1] if seen else [])
        assert stats.routers == (3 if seen else 0)
        driven.send(5)
        for reader in readers[:2]:
            await BatchCollector(reader).all_of(driven.sent[0])
        assert (driver.queue_max, driver.behind_seconds) == (0, 0.0)
        readers[0].close()
        if seen:
            await eventually(lambda: stats.routers == 2, "the end of a reader")
        left = [view for view in driver.routers if view.left is not None]
        assert [(view.stream, stats.router_disconnects[view.left]) for view in left] == ([(0, 1)] if seen else [])
        assert sum(stats.router_disconnects.values()) == len(left)


# -- opening and closing ----------------------------------------------------------------------------------------------


@both_loops
async def test_a_closing_stream_sends_its_queue_and_other_streams_continue(output):
    async with output(opened=2) as driven:
        one, two = BatchCollector(await driven.reader(0)), BatchCollector(await driven.reader(1))
        assert sorted(driven.driver.streams) == [0, 1]
        driven.publish(700, 0)
        driven.driver.close(0, linger=60.0)
        assert driven.driver.streams == [1]
        driven.send(5, 1)
        await one.all_of(driven.sent[0])
        await two.all_of(driven.sent[1])


@both_loops
async def test_closed_streams_have_no_queue_and_no_readers(output):
    async with output(opened=2) as driven:
        await driven.reader(0)
        driven.send(5, 0)
        for stream in (0, 1):
            driven.driver.close(stream)
        assert gauges(driven.stats) == gauges(OutputStats())


def gauges(stats):
    queues = (stats.queue_depth, stats.queue_limit, stats.replay_waiting, stats.replay_waiting_limit)
    return (stats.routers, stats.subscribers, *queues)


@both_loops
async def test_an_address_that_cannot_be_opened_is_named_and_no_stream_stays_open(output):
    async with output(opened=0) as driven:

        def opens():
            with contextlib.suppress(BindError):  # the system may need a moment to release an address
                driven.driver.open(0, TOPIC, PLAIN)
            return driven.driver.streams

        for place in driven.kind.places(driven.config, 0):
            with driven.kind.occupied(place), pytest.raises(BindError) as error:
                driven.driver.open(0, TOPIC, PLAIN)
            assert place in str(error.value)
            assert driven.driver.streams == []
            assert gauges(driven.stats) == gauges(OutputStats())
        await eventually(opens, "the places, free again")
        reader = BatchCollector(await driven.reader())
        driven.send(3)
        await reader.all_of(driven.sent[0])


@both_loops
async def test_readers_reconnect_after_a_reopening_and_losses_are_counted(output):
    async with output() as driven:
        reader = BatchCollector(await driven.reader())
        driven.send(5)
        await reader.all_of(driven.sent[0])
        driven.driver.reopen(PLAIN)
        assert driven.stats.subscribers == 0
        driven.send(5)
        await driven.joined()
        await eventually(lambda: not driven.stats.queue_depth, "nothing waiting any more")
        driven.send(5)
        await eventually(lambda: reader.more()[-1] == driven.sent[0][-1], "the newest batch")
        if not driven.kind.loses:
            assert reader.batches == driven.sent[0]
        meanwhile = driven.sent[0][5:10]
        assert [b for b in reader.batches if b not in meanwhile] == [*driven.sent[0][:5], *driven.sent[0][10:]]
        assert driven.stats.batches + driven.dropped == 15


@both_loops
async def test_a_failed_reopening_is_retried(output):
    async with output() as driven:
        reader = BatchCollector(await driven.reader())
        driven.send(5)
        await reader.all_of(driven.sent[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no descriptor is left for a socket
        try:
            driven.driver.reopen(PLAIN)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await driven.joined()
        driven.send(5)
        await eventually(lambda: reader.more()[-1] == driven.sent[0][-1], "the newest batch")


@both_loops
async def test_batches_that_wait_for_a_reopening_are_counted_when_the_stream_closes(output):
    async with output() as driven:
        driven.driver.reopen(PLAIN)
        driven.publish(5, events=2)
        driven.driver.close(0)
        stats = driven.stats
        assert (stats.queue_depth, stats.batches + driven.dropped) == (0, 5)
        assert stats.events + sum(stats.dropped_events.values()) == 10
