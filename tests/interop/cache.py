"""A simulated engine's cache, and the batches of events about its changes.

Every router can read these batches, so only lost or late batches make a router wrong. Each event has one block, each
block has one copy, and leaves are evicted first. Events have the form of vLLM 0.33, or the positional form of vLLM
0.14. `test_dynamo_captures` tests how routers read dialects, copies and tiers.
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
"""Number of the most recently stored blocks from which the parent of a new block is chosen."""

OLDEST: Final = 20
"""Number of the oldest leaf blocks from which the block to evict is chosen."""

RECENT: Final = 1000
"""Default number of the most recently stored blocks that the tests look up in a router, even if they are evicted."""


class Block(NamedTuple):
    """The parent and the tokens of a block of the simulated cache.

    Tests ask a router for these tokens to find the block.
    """

    parent: int | None
    tokens: tuple[int, ...]


Known = dict[int, Block]
"""Blocks of the simulated cache by hash. A parent comes before its children."""


def stored(block_hash: int, block: Block) -> dict[str, Any]:
    """Return the event that stores one block."""
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
    """Return the event that removes one block."""
    return {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": "GPU"}


class Cache:
    """The full cache of one rank of an engine, which stores new blocks and evicts old blocks.

    Args:
        seed: seed of the random blocks. Equal blocks have equal hashes in all caches.
        capacity: maximum number of blocks.
        batches: number of batches that fill the cache. Each later batch evicts as many blocks as it stores.
        rank: the rank that each batch names.
        by_position: whether events are arrays instead of maps.
        recent: number of the most recently stored blocks that `known` contains, even if they are evicted.
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
        """The blocks that tests look up in a router.

        They are the live blocks, the newest stored blocks, which may be removed by now, and all ancestors of these
        blocks.
        """
        wanted = set(self.live)
        for block in [*self.live, *list(self._ever)[-self._recent :]]:
            at: int | None = block
            while at is not None and at not in wanted:
                wanted.add(at)
                at = self._ever[at].parent
        return {block: entry for block, entry in self._ever.items() if block in wanted}

    def restart(self, seed: int) -> None:
        """Empty the cache. The blocks that it stores from now on depend on the new seed."""
        self._rng = random.Random(seed)
        self.live = {}
        self._children.clear()
        self._newest.clear()

    def batch(self) -> bytes:
        """Evict and store some blocks, and return the payload that an engine publishes for them."""
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
        block = int.from_bytes(digest[:8], "big") >> 1  # 63 bits, because some routers read hashes as signed
        self.live[block] = self._ever[block] = Block(parent, tokens)
        self._newest.append(block)
        self._depth[block] = 0 if parent is None else self._depth[parent] + 1
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        return block


class Score(NamedTuple):
    """The numbers of blocks in which a router's view differs from the engines' caches."""

    missing: int
    """Blocks that an engine holds and the router's view lacks: the router does not see these cache hits."""
    dead: int
    """Blocks in the router's view that no engine holds.

    The router sends requests to a worker that must compute them again.
    """


def score(held: set[int], live: Mapping[int, Block]) -> Score:
    """Compare the blocks that a router holds with the engine's live blocks, and count the differences."""
    return Score(len(live.keys() - held), len(held - live.keys()))
