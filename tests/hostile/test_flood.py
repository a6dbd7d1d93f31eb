"""Tests with ten times more input than each limit of kvbus permits: it keeps the limits, and its memory does not grow.

Afterwards the stream must be exact. ``FLOOD_SECONDS=60`` (``make flood``) runs
`test_the_memory_of_a_running_bus_does_not_grow_during_a_flood` for longer.
"""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvbus.core.commands import AnswerReplay
from kvbus.core.events import BatchReceived, ReplayAsked, Tick
from kvbus.core.sequencing.epoch import MAX_STALE
from kvbus.transport.engine.publisher import EnginePublisher
from tests.core.dsl import Script
from tests.doubles.answers import reading
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place, router_at, run_async
from tests.doubles.payloads import batch, payload, removed, store
from tests.doubles.socket_routers import RouterOnASet

SECONDS = float(os.environ.get("FLOOD_SECONDS", "1"))

ROUND = 200
"""Number of batches that the engine sends in one round, without a pause."""

BUFFER = 1_000
"""Size of the engine's replay buffer in batches. Each replay answer has all of them."""

SETTLED = 15
"""Number of rounds after which everything that kvbus limits has reached its limit."""


class TakesTheState(RouterOnASet):
    """A router that does not rebuild its view by replays, so that it gets the state on subscription."""

    rebuilds = False


def test_the_relay_stays_within_its_limits_during_a_flood() -> None:
    """The relay's buffers, index, journal and memory stay within their limits.

    The relay gets gaps that no replay fills, new blocks without end, stale batches and late answers, again and again.
    """
    script = Script(
        replay=True,
        max_blocks=200,
        journal_batches=20,
        reorder_batches=50,
        max_held_bytes=20_000,
        replay_timeout=1.0,
        probe_interval=1.0,
    )
    source = script.source
    answers = []
    sizes = []
    tracemalloc.start()
    seq = 0
    for round_ in range(16):
        for n in range(500):  # ten times more than the reorder buffer, with a hole before it
            seq += 1 + (n == 0 and round_ % 2)
            events = [store([seq * 4 + k for k in range(4)])]
            answers += script.relay.handle(BatchReceived(0, batch(seq, *events)), script.now)
            assert len(source.sequencer.reorder_buffer) <= 51
            assert source.sequencer.reorder_buffer.bytes <= 21_000
            assert source.normalizer.entries <= 200
        asked = script.relay.handle(ReplayAsked(0, 0, [b"id", b"", bytes(8)]), script.now)
        for command in asked:
            assert isinstance(command, AnswerReplay)
            answer = reading(script.relay, command)
            while answer.next_message() is not None:
                pass
        answers.clear()
        for _ in range(5):
            script.now += 1.0
            script.relay.handle(Tick(), script.now)
        assert len(script.relay.outputs[0].streams[0].journal) <= 20
        assert len(source.sequencer.current.unverified.stale) <= MAX_STALE
        if round_ in (5, 15):
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] < sizes[0] * 1.2 + 100_000, sizes
    stats = source.stats
    assert stats.missing == stats.recovered + stats.lost + source.sequencer.pending
    assert stats.held_overflow > 1000
    assert stats.rejected["index_full"] > 100


def test_the_number_of_unverified_batches_is_bounded() -> None:
    """kvbus limits the number of batches that it cannot attribute to an epoch.

    The engine answers no replay request, and a second publisher sends old seqs.
    """
    script = Script(replay=True)
    script.relay.handle(BatchReceived(0, batch(0, store([1]))), script.now)
    for n in range(1, 3000):
        script.relay.handle(BatchReceived(0, batch(n)), script.now)
    for n in range(1, 1900):
        script.relay.handle(BatchReceived(0, batch(n, store([9]))), script.now)
    waiting = len(script.source.sequencer.current.unverified.stale)
    assert 0 < waiting <= MAX_STALE
    assert script.stats.duplicates + waiting >= 1800, "what is let go counts as a copy"


def resident(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def arrived(source: dict[str, Any]) -> int:
    """Return the highest seq that kvbus has seen.

    It is the seq of the last delivered batch, plus the numbers of batches after it that are missing (``pending``) and
    that wait in the reorder buffer (``queue_depth``).
    """
    return int(source["last_seq"] or 0) + int(source["counts"]["pending"]) + int(source["queue_depth"])


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_the_memory_of_a_running_bus_does_not_grow_during_a_flood(tmp_path: Path) -> None:
    """The limits are too small for the engine, batches are lost, and a router reads. kvbus's memory must not grow.

    The engine waits until kvbus has read its batches. Otherwise the queue of 200,000 batches would grow whenever kvbus
    lacks CPU time.
    """

    async def main() -> None:
        limits = {"max_blocks": 80, "max_held_bytes": 100_000}
        place = Place(tmp_path, limits=limits, reorder_batches=100, replay_timeout=0.2, source_timeout=5)
        place.config["outputs"][0] |= {"journal_batches": 200, "queue_batches": 200, "send_hwm": 200}
        with place.kvbus() as command:
            await place.ready(command)
            async with EnginePublisher(place.engine, place.engine_replay, bind=True, buffer_steps=BUFFER) as engine:
                await engine.wait_for_subscriber(60)
                with router_at(place) as router:
                    await place.subscribed()
                    sizes: list[int] = []
                    end = asyncio.get_running_loop().time() + SECONDS
                    while len(sizes) < 5 * SETTLED or asyncio.get_running_loop().time() < end:
                        for n in range(ROUND):
                            base = 8 * engine.next_seq
                            if n % 100 == 99:
                                engine.skip()
                            engine.publish(payload(store(list(range(base, base + 8)))))
                        newest = engine.next_seq - 1
                        await eventually(lambda newest=newest: arrived(place.sources()[0]) == newest, "all read")
                        router.read()
                        sizes.append(resident(command.process.pid))
                    early, most = max(sizes[:SETTLED]), max(sizes[SETTLED:])
                    assert most < early + 6 * 2**20, f"{early / 2**20:.0f} MiB, then {most / 2**20:.0f} MiB"
                    metrics = place.get("/metrics")[1]
                    for full in (
                        'kvbus_events_rejected_total{reason="index_full"',
                        "kvbus_source_held_overflow_total{",
                    ):
                        assert float(metrics.partition(f"\n{full}")[2].partition("} ")[2].split()[0]) > 0, full
                    # For each missing batch, kvbus requests a replay twice, and each answer has the complete replay buffer.
                    await eventually(lambda: place.sources()[0]["state"] == "live", "the bus at rest", SECONDS + 200)
                    assert place.sources()[0]["partial"]
                    engine.publish(payload({"type": "AllBlocksCleared"}, store([7])))
                    last = engine.next_seq - 1
                    await eventually(lambda: place.sources()[0]["last_seq"] == last, "the last batch")
                # A new router is needed, because the first one has old batches in its queue. It subscribes instead of
                # requesting a replay: kvbus might count such a request, from the same address, as that of the first
                # router, which is about to get the state.
                late = TakesTheState(place.out, place.out_replay)
                try:
                    late.subscribe()
                    await eventually(
                        lambda: late.read() and {block for _, _, block in late.view.blocks} == {7}, "7 alone"
                    )
                    assert late.view.violations == []
                finally:
                    late.close()

    run_async(main())


def test_removals_of_unknown_blocks_are_counted_and_use_no_memory() -> None:
    script = Script(max_blocks=10)
    for n in range(2_000):
        script.relay.handle(BatchReceived(0, batch(n, removed(list(range(n * 50, n * 50 + 50))))), script.now)
    assert script.source.normalizer.entries == 0
    assert script.stats.filtered["unknown_block"] == 100_000
