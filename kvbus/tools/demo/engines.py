"""The engines of the demo: simulated caches with the sockets of a real release."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from kvbus.core.types import medium_key
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.engine.publisher import EnginePublisher

CAST: Final = (
    ("vllm-a", "vllm-0.33", 12.0, 400),
    ("vllm-b", "vllm-0.33", 11.0, 400),
    ("sglang", "sglang-0.5.23", 9.0, 500),
)
"""Of each engine: its name, the release it imitates, its batches per second, its cache in blocks."""

Key = tuple[int | None, str, int | str]
"""(group, medium, hash). A hash of bytes is a hex string."""


async def pause(seconds: float, stop: asyncio.Event) -> None:
    """Wait for a time, or until ``stop`` is set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), max(0.0, seconds))


class Engine:
    """An engine that publishes the events of its cache, and that can fail on request.

    Args:
        name: its name on the screen and in the bus.
        dialect: the release to imitate.
        rate: batches per second.
        blocks: size of its cache.
        seed: seed of its requests.
        directory: where its sockets are.
    """

    def __init__(self, name: str, dialect: str, rate: float, blocks: int, seed: int, directory: str) -> None:
        self.name: Final = name
        self.rate: Final = rate
        self.endpoint: Final = f"ipc://{directory}/{name}"
        self.replay_endpoint: Final = f"{self.endpoint}-replay"
        jobs = synthetic(seed, turn_tokens=96, output_tokens=96, max_tokens=2048)
        self._cache = SimEngine(dialect, jobs, options=EngineOptions(blocks=blocks, max_running=6))
        self._publisher = EnginePublisher(
            self.endpoint, self.replay_endpoint, bind=True, framing=self._cache.dialect.framing
        )
        self.published = 0
        """Batches published so far, over all restarts."""
        self._to_lose = 0
        self._known: set[Key] | None = None

    @property
    def losing(self) -> bool:
        """Whether batches are still to be lost."""
        return self._to_lose > 0

    @property
    def blocks(self) -> set[Key]:
        """The blocks in the engine's own cache."""
        if self._known is None:
            self._known = {(it["group_idx"], medium_key(it["medium"]) or "", it["hash"]) for it in self._cache.truth()}
        return self._known

    def open(self) -> None:
        """Bind the sockets."""
        self._publisher.start()

    def close(self) -> None:
        """Close the sockets."""
        self._publisher.close()

    def lose(self, batches: int) -> None:
        """Lose the next batches on the network. The engine still keeps them for a replay."""
        self._to_lose = batches

    def crash(self) -> None:
        """Restart with an empty cache, and number batches from 0 again."""
        self._publisher.restart()
        self._cache.restart()
        self._known = None

    async def serve(self, quiet: asyncio.Event) -> None:
        """Publish batches until ``quiet`` is set. Begin when kvbus and the direct router are connected."""
        while self._publisher.subscriptions < 2 and not quiet.is_set():
            await pause(0.01, quiet)
        while not quiet.is_set():
            payload = self._cache.step(time.time())
            if payload is not None:  # the workload is endless
                self._publisher.publish(payload, live=not self._to_lose)
                self.published += 1
            self._to_lose = max(0, self._to_lose - 1)
            self._known = None
            await pause(1 / self.rate, quiet)
