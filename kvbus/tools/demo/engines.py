"""The engines: simulated caches behind real publishers, with faults on request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbus.tools.demo.waiting import pause
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.engine.publisher import EnginePublisher

_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Casting:
    """An engine of the cast.

    Attributes:
        name: source name in the bus.
        dialect: release to imitate.
        rates: batches per second of each data-parallel rank.
        blocks: GPU pool of a rank, in blocks.
        cpu_blocks: CPU tier of a rank, in blocks; 0 for none.
    """

    name: str
    dialect: str
    rates: tuple[float, ...]
    blocks: int
    cpu_blocks: int = 0


CAST: Final = (
    Casting("vllm", "vllm-0.33", (12.0, 11.0), blocks=400, cpu_blocks=700),
    Casting("sglang", "sglang-0.5.23", (9.0, 8.0), blocks=500),
)


class Rank:
    """One data-parallel rank: a cache, its publisher, and faults between it and the bus.

    Args:
        casting: its engine.
        rank: its number.
        seed: seed of its workload.
        endpoint: endpoint of the live stream.
        replay_endpoint: endpoint of the replay.
    """

    def __init__(self, casting: Casting, rank: int, seed: int, endpoint: str, replay_endpoint: str) -> None:
        self.label: Final = f"{casting.name}/{rank}" if len(casting.rates) > 1 else casting.name
        self._rate = casting.rates[rank]
        self._endpoints = (endpoint, replay_endpoint)
        jobs = synthetic(seed, rank, turn_tokens=96, output_tokens=96, max_tokens=2048, tenants=3)
        tiers = {"CPU": casting.cpu_blocks} if casting.cpu_blocks else {}
        options = EngineOptions(blocks=casting.blocks, block_size=_BLOCK_SIZE, tiers=tiers, max_running=6)
        self._engine = SimEngine(casting.dialect, jobs, rank=rank, options=options)
        self._publisher: EnginePublisher | None = None
        self.last_live = -1
        """The seq of the last message on the live stream, in this epoch; -1 while there is none."""
        self.version = 0
        """Grows whenever the cache may have changed."""
        self._to_lose = 0
        self._to_jumble = 0

    @property
    def next_seq(self) -> int | None:
        """The next batch's seq; None while the engine is down."""
        return None if self._publisher is None else self._publisher.next_seq

    @property
    def misbehaving(self) -> bool:
        """Whether a fault is still under way."""
        return self._to_lose + self._to_jumble > 0

    def truth(self) -> list[dict[str, Any]]:
        """Return the live blocks of the engine's own cache."""
        return self._engine.truth()

    def lose(self, batches: int) -> None:
        """Lose the next batches on their way."""
        self._to_lose = batches

    def jumble(self, batches: int) -> None:
        """Send each of the next batches after its successor, and the successor twice."""
        self._to_jumble = batches

    def open(self) -> None:
        """Begin to listen.

        Raises:
            BindError: an endpoint is taken.
        """
        publisher = EnginePublisher(*self._endpoints, bind=True, framing=self._engine.dialect.framing)
        publisher.start()
        self._publisher = publisher
        self.last_live = -1

    async def connected(self, subscribers: int, within: float) -> None:
        """Wait until so many have subscribed, ``within`` seconds at most."""
        if self._publisher is not None:
            with contextlib.suppress(TimeoutError):
                await self._publisher.wait_for_subscriber(within, count=subscribers)

    def die(self) -> None:
        """End this epoch: sockets, buffer and cache are gone."""
        self.close()
        self._engine.restart()
        self.version += 1

    def close(self, linger: float = 0.0) -> None:
        """Stop listening."""
        if self._publisher is not None:
            self._publisher.close(linger)
            self._publisher = None

    async def serve(self, stop: asyncio.Event) -> None:
        """Publish at this rank's rate until ``stop`` is set, except while the engine is down."""
        while not stop.is_set():
            if self._publisher is not None:
                self._step(self._publisher)
            await pause(1 / self._rate, stop)

    def lose_tail(self, batches: int) -> None:
        """Publish a few last batches, and lose them all on their way."""
        self._to_lose = batches
        while self._to_lose and self._publisher is not None:
            self._step(self._publisher)

    def _step(self, publisher: EnginePublisher) -> None:
        if self._to_jumble:
            self._to_jumble -= 1
            overtaken = publisher.publish(self._batch(), live=False)
            twice = publisher.publish(self._batch())
            publisher.send_again(overtaken)
            publisher.send_again(twice)
            self.last_live = twice
            return
        seq = publisher.publish(self._batch(), live=not self._to_lose)
        if self._to_lose:
            self._to_lose -= 1
        else:
            self.last_live = seq

    def _batch(self) -> bytes:
        payload = self._engine.step(time.time())
        if payload is None:
            raise RuntimeError("an endless workload ended")
        self.version += 1
        return payload


class Engine:
    """All ranks of one engine. They stop and restart together."""

    def __init__(self, casting: Casting, ranks: Sequence[Rank]) -> None:
        self.name: Final = casting.name
        self.ranks: Final = tuple(ranks)

    def open(self) -> None:
        """Begin to listen.

        Raises:
            BindError: an endpoint is taken.
        """
        for rank in self.ranks:
            rank.open()

    def close(self) -> None:
        """Stop listening."""
        for rank in self.ranks:
            rank.close()

    async def crash(self, downtime: float, stop: asyncio.Event) -> None:
        """Crash, and restart with an empty cache after ``downtime`` seconds, or at once when ``stop`` is set."""
        for rank in self.ranks:
            rank.die()
        await pause(downtime, stop)
        self.open()
