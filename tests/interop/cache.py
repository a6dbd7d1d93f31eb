"""An engine's cache whose every batch every router reads, so that only the way of the batches can make a router wrong.

One block an event, one copy of each block, leaves evicted first; events as vLLM 0.33 sends them, or by position as 0.14
did. What routers make of dialects, copies and tiers is another question, and `test_dynamo_captures` asks it.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_SIZE: Final = 16
DEPTH: Final = 8
NEWEST: Final = 100
"""Blocks stored last that a new one may continue."""

OLDEST: Final = 20
"""Leaves among which one is evicted."""

RECENT: Final = 1000
"""Blocks stored last that are asked for, live or not, unless told otherwise."""


class Block(NamedTuple):
    """What a request has to contain to hit this block."""

    parent: int | None
    tokens: tuple[int, ...]


Known = dict[int, Block]
"""Blocks by hash, parents before their children."""


def stored(block_hash: int, block: Block) -> dict[str, Any]:
    """The store of one block."""
    return {
        "type": "BlockStored",
        "block_hashes": [block_hash],
        "parent_block_hash": block.parent,
        "token_ids": block.tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(block_hash: int) -> dict[str, Any]:
    """The removal of one block."""
    return {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": "GPU"}


class Cache:
    """A full cache of one rank that goes on storing and evicting.

    Args:
        seed: of what it stores; equal blocks have equal hashes in all caches.
        capacity: blocks.
        batches: that fill it; once it is full, each evicts as much as it stores.
        rank: said in each batch.
        by_position: events are arrays.
        recent: blocks stored last that are asked for, live or not.
    """

    def __init__(
        self,
        seed: int,
        *,
        capacity: int = 300,
        batches: int = 100,
        rank: int = 0,
        by_position: bool = False,
        recent: int = RECENT,
    ) -> None:
        self.live: Known = {}
        self._ever: Known = {}
        self._rng = random.Random(seed)
        self._capacity = capacity
        self._per_batch = capacity // batches
        self._rank = rank
        self._by_position = by_position
        self._recent = recent
        self._depth: dict[int, int] = {}
        self._newest: deque[int] = deque(maxlen=NEWEST)
        self._children: dict[int, int] = {}

    @property
    def known(self) -> Known:
        """Every block that it has or had not long ago, and what is above them."""
        wanted = set(self.live)
        for block in [*self.live, *list(self._ever)[-self._recent :]]:
            at: int | None = block
            while at is not None and at not in wanted:
                wanted.add(at)
                at = self._ever[at].parent
        return {block: entry for block, entry in self._ever.items() if block in wanted}

    def restart(self, seed: int) -> None:
        """Nothing is left, and other requests come."""
        self._rng = random.Random(seed)
        self.live = {}
        self._children.clear()
        self._newest.clear()

    def batch(self) -> bytes:
        """Evict and store some blocks; what an engine publishes of it."""
        events = [removed(self._evict()) for _ in range(len(self.live) + self._per_batch - self._capacity)]
        for _ in range(self._per_batch):
            block = self._store()
            events.append(stored(block, self.live[block]))
        said = [list(event.values()) for event in events] if self._by_position else events
        return msgspec.msgpack.encode([0.0, said, self._rank])

    def _evict(self) -> int:
        leaves = (block for block in self.live if not self._children.get(block))
        block = self._rng.choice(list(itertools.islice(leaves, OLDEST)))
        parent = self.live.pop(block).parent
        if parent is not None:
            self._children[parent] -= 1
        return block

    def _store(self) -> int:
        parents = [block for block in self._newest if block in self.live and self._depth[block] < DEPTH]
        parent = self._rng.choice(parents) if parents and self._rng.random() < 0.9 else None
        tokens = tuple(self._rng.randrange(1, 100_000) for _ in range(BLOCK_SIZE))
        above = b"" if parent is None else parent.to_bytes(8, "big")
        digest = hashlib.sha256(above + struct.pack(f"<{BLOCK_SIZE}I", *tokens)).digest()
        block = int.from_bytes(digest[:8], "big") >> 1  # some routers read hashes as signed
        self.live[block] = self._ever[block] = Block(parent, tokens)
        self._newest.append(block)
        self._depth[block] = 0 if parent is None else self._depth[parent] + 1
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        return block


class Score(NamedTuple):
    """What a router believes against what the engines hold, in blocks."""

    missing: int
    """In an engine, not at the router: cache hits it does not see."""
    dead: int
    """At the router, in no engine: requests sent where they have to be computed anew."""


def score(held: set[int], live: Mapping[int, Block]) -> Score:
    """Compare the two."""
    return Score(len(live.keys() - held), len(held - live.keys()))
