"""An SGLang engine for recordings: SGLang's real radix caches on a CPU, used as SGLang's scheduler uses them.

It matches a prefix, locks it, inserts the prompt chunk by chunk, unlocks and evicts. Two things are not SGLang's own:
the scheduler, and the pool of slots, of which only the number of free slots matters here.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.utils import compute_node_event_hash_values, hash_str_to_int64

from tests.wire.captures import Key
from tests.wire.recording.workload import Ask, Kept, Workload, continuation


@dataclass(frozen=True)
class Family:
    """The configuration with which one kind of SGLang stream is recorded."""

    page: int = 16
    slots: int = 2400
    eagle: bool = False
    salts: bool = False
    resets: float = 0.003


FAMILIES = {
    "page16": Family(),
    "page1": Family(page=1),
    "salts": Family(salts=True),
    "eagle": Family(eagle=True),
    "eagle_page1": Family(eagle=True, page=1),
}


class Slots:
    """A pool of memory slots for SGLang's cache, with only the methods that this cache calls."""

    device = "cpu"

    def __init__(self, size: int) -> None:
        self.free = size

    def free_segment(self, value: Any, start_pos: int) -> None:
        self.free += len(value)


@dataclass
class Running:
    """A request between its first prompt chunk and its last token."""

    ask: Ask
    tokens: list[int]
    computed: int
    node: Any
    held: int
    left: int


class Engine:
    """An SGLang cache that a test advances step by step, and the batches that it has published."""

    def __init__(self, family: Family, seed: int, publisher: Any = None) -> None:
        self.family = family
        self.random = random.Random(seed * 7 + 1)
        self.work = Workload(seed, salts=family.salts)
        self.steps = self.resets = self.aborts = 0
        self.slots = Slots(family.slots)
        self.cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.slots,
                page_size=family.page,
                is_eagle=family.eagle,
                enable_kv_cache_events=True,
            )
        )
        kept = Kept(lambda: 1_700_000_000 + self.steps / 64)
        self.published = kept.batches
        self._publish = publisher.publish if publisher else kept.publish
        self.running: list[Running] = []

    def step(self) -> None:
        self.steps += 1
        chance = self.random
        if len(self.running) < 5 and chance.random() < 0.6:
            self._admit(self.work.next())
        for request in list(self.running):
            if chance.random() < 0.003:
                self.aborts += 1
                self._finish(request)
            elif request.computed < len(request.tokens):
                self._compute(request, 128)
            elif request.left:
                request.left -= 1
                request.tokens.append(continuation(request.tokens))
                self._compute(request, 1)
            else:
                self._insert(request)
                self._finish(request)
                request.ask.conversation += request.tokens[len(request.ask.tokens) :][:30]
        if chance.random() < self.family.resets:
            self.resets += 1
            for request in list(self.running):
                self._finish(request)  # the engine flushes its cache when nothing runs
            self.slots.free = self.family.slots
            self.cache.reset()
        if events := self.cache.take_events():
            self._publish(KVEventBatch(ts=0.0, events=events, attn_dp_rank=0))

    def _key(self, request: Running, upto: int) -> RadixKey:
        return RadixKey(array("q", request.tokens[:upto]), is_bigram=self.family.eagle, cache_salt=request.ask.salt)

    def _admit(self, ask: Ask) -> None:
        request = Running(ask, list(ask.tokens), 0, self.cache.root_node, 0, ask.answer)
        found = self.cache.match_prefix(MatchPrefixParams(key=self._key(request, len(request.tokens) - 1)))
        request.node, request.computed = found.last_device_node, found.device_prefix_len
        self.cache.inc_lock_ref(request.node)
        self.running.append(request)

    def _compute(self, request: Running, count: int) -> None:
        count = min(count, len(request.tokens) - request.computed)
        if self.slots.free < count:
            self.cache.evict(EvictParams(num_tokens=count - self.slots.free))
        if self.slots.free < count:
            self._finish(request)  # retract the request: free its own slots, and keep the blocks in the tree
            return
        self.slots.free -= count
        request.held += count
        request.computed += count
        if count > 1 and request.computed < len(request.tokens):
            self._insert(request)

    def _insert(self, request: Running) -> None:
        key = self._key(request, request.computed)
        before = self.cache.total_size()
        self.cache.insert(InsertParams(key=key, value=torch.arange(request.computed)))
        request.held -= self.cache.total_size() - before
        self.cache.dec_lock_ref(request.node)
        request.node = self.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
        self.cache.inc_lock_ref(request.node)

    def _finish(self, request: Running) -> None:
        self.running.remove(request)
        self.cache.dec_lock_ref(request.node)
        self.slots.free += request.held

    def pool(self) -> dict[Key, int]:
        """Return every page in the radix tree by the hash that SGLang gives it, with its number of copies."""
        found: Counter[Key] = Counter()
        nodes = list(self.cache.root_node.children.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.hash_value is None and node.event_hash_value is None:
                raise AssertionError("a node of which nothing was published")
            plain = node.key.extra_key is None and node.key.cache_salt is None
            names = node.hash_value if plain else compute_node_event_hash_values(node, self.family.page)
            assert len(names) == len(node.key) // self.family.page
            found.update((None, "GPU", hash_str_to_int64(name)) for name in names)
        return dict(found)

    def counts(self) -> dict[str, int]:
        return {"resets": self.resets, "aborts": self.aborts}

    def kinds(self) -> list[str]:
        return []
