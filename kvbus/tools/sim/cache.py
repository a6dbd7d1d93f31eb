"""A small prefix cache with real allocation, hits, reference counts and eviction, but without a model.

The cache does no I/O and is deterministic. It has a fixed pool of blocks, as vLLM has. A request references the blocks
of its longest cached prefix. For its other tokens it allocates the blocks that were freed longest ago, which evicts
their old content. A finished request frees its last block first, so leaves are evicted before their parents. Engines
differ in one rule, which determines the events:

* With ``copies=True`` (vLLM) a prompt that is completely cached still computes its last block again, into a
  second physical block with the same hash. The hash is then stored twice and removed twice.
* With ``copies=False`` (SGLang's radix cache) the request uses the cached block instead of its own. Each hash
  is stored once.

A finished request writes its blocks to the lower tiers (write-through, parents first). A request whose prefix continues
in a lower tier copies the block back to the GPU pool (onboard). The block is then live in both tiers. The events of the
cache have no wire form. `kvbus.tools.sim.dialects` encodes them in an engine's dialect.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GPU: Final = "GPU"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The content of one full block. If the cache has several physical copies of the block, they share this object.

    Attributes:
        digest: SHA-256 chained over the complete prefix, 32 bytes.
        parent: the previous block of the prompt; None for the first block.
        tokens: the ``block_size`` token ids of the block.
        tenant: LoRA adapter or cache salt; "" for none.
    """

    digest: bytes
    parent: Block | None
    tokens: tuple[int, ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """An event of the cache: these blocks became live in a tier. Each block is the parent of the next block."""

    blocks: tuple[Block, ...]
    tier: str
    group_idx: int


@dataclass(frozen=True, slots=True)
class Removed:
    """An event of the cache: one copy of each block in ``blocks`` was removed from a tier."""

    blocks: tuple[Block, ...]
    tier: str
    group_idx: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """An event of the cache: the GPU pool was reset and is empty."""


Event = Stored | Removed | Cleared


@dataclass(slots=True)
class LiveBlock:
    """A live block, and the number of its physical copies in one tier."""

    block: Block
    copies: int


def make_block(parent: Block | None, tokens: Sequence[int], tenant: str = "") -> Block:
    """Return a block whose hash continues its parent's hash. The hash of a first block depends on the tenant.

    ``tenant`` is a LoRA adapter or cache salt; "" for none.
    """
    digest = hashlib.sha256(parent.digest if parent else tenant.encode())
    digest.update(struct.pack(f"<{len(tokens)}Q", *tokens))
    return Block(digest.digest(), parent, tuple(tokens), tenant)


@dataclass(slots=True, eq=False)
class _Slot:
    """One physical block of the simulated GPU pool, and the content that it holds."""

    number: int
    refs: int = 0
    block: Block | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A running request and its blocks.

    Attributes:
        tokens: prompt and output tokens. The simulated output is known in advance.
        prompt: number of prompt tokens.
        tenant: LoRA adapter or cache salt; "" for none.
        computed: number of computed tokens, including prompt tokens found in the cache.
        cached_prompt: number of prompt tokens found in the cache.
        slots: the physical blocks of the request.
        chain: contents of the full blocks of the request.
    """

    tokens: Sequence[int]
    prompt: int
    tenant: str = ""
    computed: int = 0
    cached_prompt: int = 0
    slots: list[_Slot] = field(default_factory=list)
    chain: list[Block] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether every token of the request is computed."""
        return self.computed >= len(self.tokens)


class PrefixCache:
    """The cache of one rank of a simulated engine, for one KV-cache group.

    Every method that changes the cache records events. `take_events` returns them.

    Args:
        blocks: size of the GPU pool in blocks.
        block_size: tokens per block.
        copies: whether several physical blocks may have the same hash (vLLM: True, SGLang: False).
        tiers: capacity of each lower tier in blocks, fastest tier first, such as ``{"CPU": 4000, "DISK": 20000}``.
        group_idx: the KV-cache group that the events name.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        copies: bool = True,
        tiers: Mapping[str, int] | None = None,
        group_idx: int = 0,
    ) -> None:
        if blocks < 2 or block_size < 1:
            raise ValueError(f"a cache needs 2 or more blocks of 1 or more tokens, not {blocks} of {block_size}")
        self.block_size: Final = block_size
        self.group_idx: Final = group_idx
        self._copies = copies
        self._free = OrderedDict((number, _Slot(number)) for number in range(blocks))
        self._cached: dict[bytes, dict[int, _Slot]] = {}
        self._tiers: dict[str, tuple[int, OrderedDict[bytes, Block]]] = {
            name: (capacity, OrderedDict()) for name, capacity in (tiers or {}).items()
        }
        self._running: dict[int, Request] = {}
        self._events: list[Event] = []

    def take_events(self) -> list[Event]:
        """Return the events since the last call of this method, oldest first."""
        events, self._events = self._events, []
        return events

    def fits(self, length: int) -> bool:
        """Return whether a request of `length` tokens, prompt and output together, can start now."""
        return self._blocks_for(length) <= len(self._free)

    def start(self, tokens: Sequence[int], prompt: int, tenant: str = "") -> Request:
        """Start a request: reference the blocks of its cached prefix, and allocate blocks for its other tokens.

        Args:
            tokens: prompt and output together.
            prompt: number of prompt tokens. A request always computes the last prompt token. So a prompt that is
                completely cached still computes one block. (This is vLLM's rule and the reason for second copies.)
            tenant: LoRA adapter or cache salt; "" for none.

        Raises:
            ValueError: the request does not fit. Check `fits` first.
        """
        if not self.fits(len(tokens)):
            raise ValueError(f"{len(tokens)} tokens do not fit in {len(self._free)} free blocks")
        request = Request(tokens, prompt, tenant)
        reusable = max(0, prompt - 1) // self.block_size
        self._reuse(request, reusable)
        while len(request.slots) < self._blocks_for(len(tokens)):
            request.slots.append(self._allocate())
        request.cached_prompt = request.computed = len(request.chain) * self.block_size
        self._running[id(request)] = request
        return request

    def compute(self, request: Request, tokens: int) -> None:
        """Compute the next `tokens` tokens of a request. Each block that becomes full is cached."""
        request.computed = min(request.computed + tokens, len(request.tokens))
        stored: list[Block] = []
        while (len(request.chain) + 1) * self.block_size <= request.computed:
            block = self._block_of(request)
            slot = request.slots[len(request.chain)]
            copies = self._cached.get(block.digest)
            if copies and not self._copies:
                # Keep the cached page and free the page that the request has computed, as SGLang's radix cache does.
                own, slot = slot, next(iter(copies.values()))
                self._reference(slot)
                block = slot.block or block
                request.slots[len(request.chain)] = slot
                own.refs = 0
                self._free[own.number] = own
                self._free.move_to_end(own.number, last=False)
                self._flush(stored, GPU)
            else:
                self._hold(slot, block)
                stored.append(block)
            request.chain.append(block)
        self._flush(stored, GPU)

    def finish(self, request: Request) -> None:
        """End a request and free its blocks, the last block first. Cached blocks stay until they are evicted."""
        del self._running[id(request)]
        for tier in self._tiers:
            self._write_through(request.chain, tier)
        for slot in reversed(request.slots):
            slot.refs -= 1
            if slot.refs:
                continue
            self._free[slot.number] = slot
            if slot.block is None:  # the block never became full, so it is reused first
                self._free.move_to_end(slot.number, last=False)

    def clear(self) -> None:
        """End all requests, and empty all tiers.

        The blocks of lower tiers get removal events, because the event `Cleared` is only about the GPU pool.
        """
        for request in list(self._running.values()):
            self.finish(request)
        for name, (_, held) in self._tiers.items():
            if held:
                self._events.append(Removed(tuple(held.values()), name, self.group_idx))
                held.clear()
        for slots in self._cached.values():
            for slot in slots.values():
                slot.block = None
        self._cached.clear()
        self._events.append(Cleared())

    def live_blocks(self) -> dict[tuple[int, str, bytes], LiveBlock]:
        """Return all live blocks of the cache, by (group_idx, tier, digest)."""
        live: dict[tuple[int, str, bytes], LiveBlock] = {}
        for digest, slots in self._cached.items():
            block = next(iter(slots.values())).block
            if block is not None:
                live[self.group_idx, GPU, digest] = LiveBlock(block, len(slots))
        for name, (_, held) in self._tiers.items():
            live.update({(self.group_idx, name, digest): LiveBlock(block, 1) for digest, block in held.items()})
        return live

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _block_of(self, request: Request) -> Block:
        """Return the next block of a request, which follows the request's last full block. It may have fewer tokens."""
        start = len(request.chain) * self.block_size
        parent = request.chain[-1] if request.chain else None
        return make_block(parent, request.tokens[start : start + self.block_size], request.tenant)

    def _reference(self, slot: _Slot) -> None:
        if slot.refs == 0:
            del self._free[slot.number]
        slot.refs += 1

    def _allocate(self) -> _Slot:
        _, slot = self._free.popitem(last=False)
        if slot.block is not None:
            copies = self._cached[slot.block.digest]
            del copies[slot.number]
            if not copies:
                del self._cached[slot.block.digest]
            self._events.append(Removed((slot.block,), GPU, self.group_idx))
            slot.block = None
        slot.refs = 1
        return slot

    def _reuse(self, request: Request, reusable: int) -> None:
        """Take a reference to each block of the request's longest cached prefix, up to `reusable` blocks.

        The GPU pool evicts no block with references. Blocks that are only in a lower tier are copied into this pool.
        """
        onboarded: list[Block] = []
        while len(request.chain) < reusable:
            block = self._block_of(request)
            copies = self._cached.get(block.digest)
            if copies:
                slot = next(iter(copies.values()))
                self._reference(slot)
                # Use the object that the pool has for this block, so that all requests share it.
                block = slot.block or block
                self._flush(onboarded, GPU)
            elif any(block.digest in held for _, held in self._tiers.values()):
                slot = self._allocate()
                self._hold(slot, block)
                onboarded.append(block)
            else:
                break
            request.slots.append(slot)
            request.chain.append(block)
        self._flush(onboarded, GPU)

    def _hold(self, slot: _Slot, block: Block) -> None:
        slot.block = block
        self._cached.setdefault(block.digest, {})[slot.number] = slot

    def _write_through(self, chain: list[Block], tier: str) -> None:
        """Copy the blocks of a finished request to a lower tier. ``chain`` has these blocks, parents first.

        If the tier is full, evict its oldest blocks, leaves first.
        """
        capacity, held = self._tiers[tier]
        own = {block.digest for block in chain}
        stored: list[Block] = []
        for block in chain:
            if block.digest in held:
                self._flush(stored, tier)
                continue
            if len(held) >= capacity:
                oldest = next(iter(held), None)
                if oldest is None or oldest in own:
                    break  # the chain is larger than the tier, and a block is useless without its parent
                self._flush(stored, tier)
                self._events.append(Removed((held.pop(oldest),), tier, self.group_idx))
            held[block.digest] = block
            stored.append(block)
        self._flush(stored, tier)
        for block in reversed(chain):
            if block.digest in held:
                held.move_to_end(block.digest)

    def _flush(self, stored: list[Block], tier: str) -> None:
        if stored:
            self._events.append(Stored(tuple(stored), tier, self.group_idx))
            stored.clear()
