"""Batches of kvbus as RouterEvents, still without their event ids: each connection numbers them on its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from kvbus.core.types import MEDIA, Reason, Tier, medium_key
from kvbus.core.wire.codec import AnyEvent, decode_batch
from kvbus.core.wire.encoding import decode_value
from kvbus.core.wire.parts import field, hashes_of, is_store, value
from kvbus.core.wire.schema import AllBlocksCleared
from kvbus.core.wire.tokens import decode_tokens
from kvbus.parts.outputs.dynamo.hashing import MASK, blocks_of, images_in, namespace_in, seed, tokens_hash

TIERS: Final = {Tier.DEVICE: "device", Tier.HOST: "host_pinned", Tier.DISK: "disk", Tier.EXTERNAL: "external"}

MAX_SALTED: Final = 1_000_000
"""Blocks whose cache namespace is remembered: vLLM says it with the first block of a prompt, and its children have it
too. Where a parent's is forgotten the child is hashed without one, and no request finds it."""

_HERE: Final = (None, "LOCAL")
"""Localities of blocks that the worker itself has."""

_encode: Final = msgspec.msgpack.Encoder().encode


class RouterEvent(NamedTuple):
    """One event, encoded up to its id and behind it."""

    head: bytes
    tail: bytes


class Batch(NamedTuple):
    """The events of one batch, and the time it says. None stands for a clear of the rank."""

    ts: float
    events: list[RouterEvent | None]


class Translator:
    """Translate the batches of one rank.

    Args:
        worker: the worker's id in Dynamo.
        rank: its data-parallel rank.
        left_out: called with the number of events about blocks that are elsewhere, which no KvRouter takes.
    """

    def __init__(self, worker: int, rank: int, left_out: Callable[[int], None]) -> None:
        self._left_out = left_out
        self._heads = {
            tier: b"\x83%b%b%b%b%b\x83%b\xcf"
            % tuple(map(_encode, ("worker_id", worker, "storage_tier", name, "event", "event_id")))
            for tier, name in TIERS.items()
        }
        self._rank = _encode("dp_rank") + _encode(rank)
        self._salted: dict[int, str] = {}
        self.filler = self._event(Tier.DEVICE, {"removed": {"block_hashes": []}})
        """An event that changes nothing."""

    def batch(self, payload: bytes) -> Batch:
        """Translate one batch.

        Raises:
            ValueError: it is none that kvbus writes.
        """
        batch = decode_batch(payload, sys.maxsize)  # the relay has bounded it
        if isinstance(batch, Reason):
            raise ValueError(f"no batch: {batch}")  # noqa: TRY004 - it is the value that is wrong
        local = [event for event in batch.events if _plain(event, "locality") in _HERE]
        if len(local) < len(batch.events):
            self._left_out(len(batch.events) - len(local))
        return Batch(batch.ts, [self._translated(event) for event in local])

    def _translated(self, event: AnyEvent) -> RouterEvent | None:
        if isinstance(event, AllBlocksCleared):
            self._salted.clear()
            return None
        hashes = [int(block) & MASK for block in hashes_of(event)]
        tier = MEDIA[medium_key(value(event, "medium")) or "GPU"]
        if not is_store(event):
            return self._event(tier, {"removed": {"block_hashes": hashes}})
        parent = value(event, "parent_block_hash")
        parent = None if parent is None else parent & MASK
        stored = {"parent_hash": parent, "start_position": None, "blocks": self._blocks(event, hashes, parent)}
        return self._event(tier, {"stored": stored})

    def _blocks(self, event: AnyEvent, hashes: list[int], parent: int | None) -> list[dict[str, Any]]:
        tokens = decode_tokens(field(event, "token_ids"))
        if isinstance(tokens, Reason):
            raise ValueError(f"no tokens: {tokens}")  # noqa: TRY004 - it is the value that is wrong
        lora = value(event, "lora_name")
        keys = _plain(event, "extra_keys")
        keys = keys if isinstance(keys, list) else []
        namespace = self._namespace(event, keys, lora, parent)
        if namespace:
            self._remember(hashes, namespace)
        first = seed(lora, namespace)
        found = []
        for at, (block, data) in enumerate(zip(hashes, blocks_of(tokens, field(event, "block_size")), strict=True)):
            images = images_in(keys[at], lora) if at < len(keys) else []
            info = {"mm_objects": [{"mm_hash": image, "offsets": []} for image in images]} if images else None
            found.append({"block_hash": block, "tokens_hash": tokens_hash(data, first, images), "mm_extra_info": info})
        return found

    def _namespace(self, event: AnyEvent, keys: list[Any], lora: str | None, parent: int | None) -> str | None:
        salt = _plain(event, "cache_salt")
        if isinstance(salt, str) and salt:
            return salt
        return namespace_in(keys[0], lora) if keys and parent is None else self._salted.get(parent or 0)

    def _remember(self, hashes: list[int], namespace: str) -> None:
        self._salted.update(dict.fromkeys(hashes, namespace))
        while len(self._salted) > MAX_SALTED:
            del self._salted[next(iter(self._salted))]

    def _event(self, tier: Tier, data: dict[str, Any]) -> RouterEvent:
        return RouterEvent(self._heads[tier], _encode("data") + _encode(data) + self._rank)


def _plain(event: AnyEvent, name: str) -> Any:
    """A field that is only carried elsewhere."""
    raw = value(event, name)
    return None if raw is None else decode_value(raw)
