"""Test of kvbus under a steady load with eight routers that read, one that reads nothing, and one that joins.

Every ten seconds another router joins. kvbus's event loop must rarely be late, its memory must not grow, and the
routers that read must have exactly the engine's blocks at the end. ``make flood SECONDS=600`` runs the test for longer
and prints the measured values.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from pathlib import Path
from statistics import linear_regression

import pytest
import zmq

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place, Program, engine_at, run_async
from tests.doubles.payloads import payload, removed, store
from tests.doubles.socket_routers import RouterOnASet
from tests.hostile.test_flood import resident

SECONDS = float(os.environ.get("FLOOD_SECONDS", "6"))
LONG = SECONDS >= 60

ROUTERS = 8
RATE = 500
"""Number of batches that the engine publishes per second. Each stores 8 blocks."""

LIVE = 2_500 if LONG else 500
"""Number of the engine's newest batches whose blocks it still has. It removes older blocks."""

JOINS = 10.0 if LONG else 1.0
"""Seconds from one joining router to the next."""

ENOUGH = SECONDS / JOINS / 3
"""Minimum number of routers that must have joined at the end."""

LOOKS = 6
"""Minimum number of samples of kvbus's memory."""

MOST_AT_ONCE = 100
"""Maximum number of batches that the engine publishes without a pause."""

LATE = 0.05 if LONG else 0.5
"""Seconds by which a tick of kvbus's event loop may be late.

1 % of the ticks, or one tick of a short run, may be later.
"""


class Crowd:
    """The engine and the routers of a kvbus process, and samples of the memory of this process."""

    def __init__(self, place: Place, engine: EnginePublisher) -> None:
        self.place = place
        self.engine = engine
        self.routers = [RouterOnASet(place.out, place.out_replay) for _ in range(ROUTERS)]
        self.joined = 0
        self.sizes: list[tuple[float, float]] = []
        """Samples of kvbus's memory: the time of each in seconds, and the memory in MiB."""
        self._stored: list[list[int]] = []

    @property
    def live(self) -> set[int]:
        """Hashes of the blocks in the engine's cache."""
        return {block for blocks in self._stored for block in blocks}

    def publish(self) -> None:
        """Publish a batch that stores eight blocks and, if the cache is full, removes the oldest eight blocks."""
        first = 8 * self.engine.next_seq
        self._stored.append(list(range(first, first + 8)))
        events = [store(self._stored[-1])]
        if len(self._stored) > LIVE:
            events.insert(0, removed(self._stored.pop(0)[::-1]))
        self.engine.publish(payload(*events))

    async def load(self, command: Program) -> None:
        """Publish batches at the steady rate for `SECONDS` seconds, while routers join, read and leave."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        joiner = asyncio.create_task(self._join())
        sent, look = 0, 0.0
        while (
            (elapsed := loop.time() - begun) < SECONDS
            or len(self.sizes) < LOOKS
            or (self.joined < ENOUGH and not LONG)  # a busy machine needs longer to send the state
        ):
            # On a busy machine, the engine sends fewer batches, but the test takes as many samples of the memory.
            for _ in range(min(MOST_AT_ONCE, int(elapsed * RATE) - sent)):
                self.publish()
                sent += 1
            for router in self.routers:
                router.read()
            if elapsed > look:
                self.sizes.append((elapsed, resident(command.process.pid) / 2**20))
                look = elapsed + 0.5
            await asyncio.sleep(0.005)
            assert not joiner.done(), joiner.exception()
        joiner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await joiner

    async def _join(self) -> None:
        """Let one router after another join, read the complete state, and leave."""
        while True:
            await asyncio.sleep(JOINS)
            router = RouterOnASet(self.place.out, self.place.out_replay)
            try:
                router.subscribe()
                await router.replay()
                await eventually(
                    lambda router=router: router.read() and len(router.view.blocks) >= 4 * LIVE, "the state"
                )
                self.joined += 1
            finally:
                router.close()

    async def exact(self) -> None:
        """Check that every router holds the engine's blocks after the engine's last batch."""
        for router in self.routers:

            def there(router: RouterOnASet = router) -> bool:
                router.read()
                return {block for _, _, block in router.view.blocks} == self.live

            await eventually(there, f"a router that has what the engine has ({len(self.live)} blocks)")
            assert router.view.violations == []


def lag(metrics: str) -> dict[float, float]:
    """Return the histogram of the event loop's delays: for each limit in seconds, the number of delays up to this
    limit.
    """
    buckets = re.findall(r'kvbus_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', metrics)
    return {float(bound): float(count) for bound, count in buckets}


def waited(process: int) -> float:
    """Return the seconds for which a process has waited for a CPU."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_ten_routers_delay_no_batch_and_do_not_grow_the_memory(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path)
        place.config["outputs"][0] |= {"journal_batches": 200, "queue_batches": 200, "send_hwm": 200}
        stalled = zmq.Context()
        with place.kvbus() as command:
            await place.ready(command)
            async with engine_at(place) as engine:
                crowd = Crowd(place, engine)
                deaf = stalled.socket(zmq.SUB)
                deaf.setsockopt(zmq.RCVHWM, 1)
                deaf.setsockopt(zmq.RCVBUF, 4096)
                deaf.setsockopt(zmq.SUBSCRIBE, b"")
                deaf.connect(place.out)
                try:
                    for router in crowd.routers:
                        router.subscribe()
                    there = f'kvbus_output_subscribers{{output="routers"}} {ROUTERS + 1}.0'
                    await eventually(lambda: there in place.get("/metrics")[1], "all subscriptions")
                    before, waited_before = lag(place.get("/metrics")[1]), waited(command.process.pid)
                    await crowd.load(command)
                    metrics = place.get("/metrics")[1]
                    ticks = {bound: count - before[bound] for bound, count in lag(metrics).items()}
                    everything = ticks[float("inf")]
                    p99 = next(
                        bound for bound, count in ticks.items() if count >= everything - max(1, everything / 100)
                    )
                    settled = crowd.sizes[len(crowd.sizes) // 3 :]
                    slope = linear_regression([at for at, _ in settled], [size for _, size in settled]).slope * 60
                    first, last = settled[0][1], settled[-1][1]
                    text = (
                        f"{SECONDS:g} s, {ROUTERS} routers, {crowd.joined} joined: lag p99 ≤ {p99 * 1e3:g} ms of "
                        f"{everything:g} ticks {ticks}, waited for a CPU {waited(command.process.pid) - waited_before:.1f} s; "
                        f"memory {first:.1f} then {last:.1f} MiB, slope {slope:+.3f} MiB a minute\n"
                    )
                    sys.stdout.write(text)
                    assert p99 <= LATE, text
                    assert last < first * 1.05 + 8, text
                    assert crowd.joined >= ENOUGH, text
                    slow = 'kvbus_output_dropped_batches_total{output="routers",reason="slow_router"} 0.0'
                    assert not LONG or slow not in metrics, "the one that reads nothing has lost nothing"
                    await crowd.exact()
                finally:
                    deaf.close(0)
                    stalled.term()
                    for router in crowd.routers:
                        router.close()

    run_async(main())
