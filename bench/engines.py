"""Batches of an engine in several dialects with the same content, encoded by the simulator's encoder."""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvbus.tools.sim.cache import GPU, Block, Event, Removed, Stored
from kvbus.tools.sim.dialects import DIALECTS, BatchEncoder

from .loads import BLOCK, LANES, PROBE, SEQUENCE

NAMES: Final = {
    "vLLM's maps": "vllm-0.33",
    "vLLM's arrays": "vllm-0.22",
    "SGLang's maps": "sglang-0.5.23",
    "SGLang's arrays": "sglang-0.5.18",
}
"""The measured dialects, with the release that each follows."""

MAPS: Final = "vLLM's maps"
"""The dialect with which the others are compared."""


def encoder(dialect: str, rank: int = 0) -> BatchEncoder:
    """Return the encoder of a dialect. An event has the same blocks in every dialect, so that loads are comparable."""
    return BatchEncoder(replace(DIALECTS[NAMES[dialect]], units="run", removed_units="run"), rank=rank)


class Engine:
    """The cache of an engine: prompts of 256 blocks, of which a few grow at the same time.

    Args:
        events: number of events in a batch.
        blocks: number of blocks in an event; a divisor of 256.
        live: number of blocks after which half of the events are removals; None for stores only.
        seed: number that determines the content.
    """

    def __init__(self, events: int, blocks: int, live: int | None = None, seed: int = 0) -> None:
        self._events, self._blocks, self._live = events, blocks, live
        self._rng = random.Random(f"kvbus/bench/engines/{seed}")
        self._growing: deque[list[Block]] = deque([] for _ in range(LANES))
        self._finished: deque[list[Block]] = deque()
        self._held = 0

    def step(self) -> list[Event]:
        """Return the events of the next batch."""
        full = self._live is not None and self._held >= self._live
        found: list[Event] = []
        for _ in range(max(self._events // 2, 1) if full else self._events):
            found.append(self._store())
            if full:
                found.append(self._remove())
        return found

    def _store(self) -> Stored:
        prompt = self._growing.popleft()
        for _ in range(self._blocks):
            tokens = tuple(token | 256 for token in struct.unpack(f"<{BLOCK}H", self._rng.randbytes(2 * BLOCK)))
            prompt.append(Block(self._rng.randbytes(32), prompt[-1] if prompt else None, tokens))
        self._held += self._blocks
        if len(prompt) == SEQUENCE:
            self._finished.append(prompt)
        self._growing.append(prompt if len(prompt) < SEQUENCE else [])
        return Stored(tuple(prompt[-self._blocks :]), GPU, 0)

    def _remove(self) -> Removed:
        prompt = self._finished[0]
        last = prompt[-self._blocks :]
        del prompt[-self._blocks :]
        if not prompt:
            self._finished.popleft()
        self._held -= self._blocks
        return Removed(tuple(reversed(last)), GPU, 0)

    def batches(self, dialects: Sequence[str], rank: int = 0) -> Iterator[dict[str, bytes]]:
        """Yield, for ever, the next batch in each dialect."""
        encoders = {dialect: encoder(dialect, rank) for dialect in dialects}
        while True:
            events = self.step()
            yield {dialect: each.encode(events, 0.0)[0] for dialect, each in encoders.items()}


def probe(dialect: str, number: int, rank: int) -> bytes:
    """Return a batch with a block that is not part of a load, to test a connection."""
    return encoder(dialect, rank).encode(Engine(1, 1, seed=-1 - number).step(), PROBE)[0]
