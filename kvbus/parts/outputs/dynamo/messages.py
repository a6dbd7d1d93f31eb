"""Translate kvbus's batches into Dynamo's RouterEvents.

A RouterEvent has block hashes that Dynamo defines, and an event id. Each connection has its own sequence of event ids.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from kvbus.core.types import MEDIA, Reason, Tier, medium_key
from kvbus.core.wire.codec import AnyEvent, decode_batch
from kvbus.core.wire.encoding import decode_value, field, hashes_of, is_store, value
from kvbus.core.wire.schema import AllBlocksCleared
from kvbus.core.wire.tokens import Token, array_head, decode_tokens
from kvbus.transport.zmtp.wire import LONG, encode_message

SEED: Final = 1337
MASK: Final = 2**64 - 1

SALT_TAG: Final = "dynamo-cache-salt:"
"""Prefix of the cache namespace in vLLM's ``extra_keys``. A Dynamo worker puts it there."""

_DIGEST: Final = 64
"""Number of hexadecimal characters in the digest by which vLLM identifies an image in ``extra_keys``."""


def seed(lora: str | None, namespace: str | None) -> int:
    """Return the seed of Dynamo's block hashes for one LoRA adapter and one cache namespace."""
    found = SEED
    if lora:
        found += xxh3_64_intdigest(lora.encode(), seed=0)
    if namespace:
        found += xxh3_64_intdigest(namespace.encode(), seed=1)
    return found & MASK


def blocks_of(tokens: Sequence[Token], size: int) -> list[bytes]:
    """Return the bytes that Dynamo hashes for each block of ``size`` tokens.

    If the tokens are EAGLE's token pairs, the bytes of a block also contain the first token of the next block.
    """
    pairs = bool(tokens) and isinstance(tokens[0], tuple)
    firsts = [token[0] if isinstance(token, tuple) else token for token in tokens]
    data = struct.pack(f"<{len(firsts)}I", *firsts)
    found = [data[at : at + 4 * size] for at in range(0, len(data), 4 * size)]
    if pairs:
        lasts = [token[1] for token in tokens[size - 1 :: size] if isinstance(token, tuple)]
        found = [block + struct.pack("<I", last) for block, last in zip(found, lasts, strict=True)]
    return found


def tokens_hash(block: bytes, seed: int, images: Iterable[int] = ()) -> int:
    """Return Dynamo's hash of one block, from its bytes and the hashes of its images."""
    return xxh3_64_intdigest(block + b"".join(image.to_bytes(8, "little") for image in sorted(images)), seed=seed)


def images_in(keys: Any, lora: str | None) -> list[int]:
    """Return the hashes of the images in one block. ``keys`` is the block's entry in vLLM's ``extra_keys``.

    A pair in the entry is an image and its offset. A single string is an image only if it is a digest. Other strings
    are LoRA adapters and salts.
    """
    found = []
    for each in keys if isinstance(keys, list) else ():
        tagged = isinstance(each, list) and len(each) == 2
        name = each[0] if tagged else each
        if not isinstance(name, str) or not name or (name == lora and not tagged):
            continue
        if len(name) == _DIGEST and all(char in "0123456789abcdefABCDEF" for char in name):
            found.append(int(name[:16], 16))
        elif tagged:
            found.append(xxh3_64_intdigest(name.encode(), seed=0))
    return found


def namespace_in(keys: Any, lora: str | None) -> str | None:
    """Return the cache namespace of a store; None if it has no namespace.

    ``keys`` is the entry of the store's first block in vLLM's ``extra_keys``.
    """
    for each in keys if isinstance(keys, list) else ():
        if isinstance(each, str) and each != lora and len(each) > len(SALT_TAG) and each.startswith(SALT_TAG):
            return each.removeprefix(SALT_TAG)
    return None


TIERS: Final = {Tier.DEVICE: "device", Tier.HOST: "host_pinned", Tier.DISK: "disk", Tier.EXTERNAL: "external"}

MAX_SALTED: Final = 1_000_000
"""Maximum number of blocks for which kvbus remembers the cache namespace.

vLLM sends the namespace only with the first block of a prompt, and all its child blocks have the same namespace. If
kvbus has forgotten the namespace of a parent, it hashes the child as if it had no namespace. A router then does not
find the child for a request with this namespace.
"""

_HERE: Final = (None, "LOCAL")
"""Values of an event's field ``locality`` which say that the worker itself has the blocks."""

_encode: Final = msgspec.msgpack.Encoder().encode


class RouterEvent(NamedTuple):
    """One encoded RouterEvent of Dynamo without its event id: the bytes before the id, and the bytes after it."""

    head: bytes
    tail: bytes


class Batch(NamedTuple):
    """The timestamp of a batch, and its events as Dynamo's RouterEvents.

    A None in the list of events means that all blocks are cleared.
    """

    ts: float
    events: list[RouterEvent | None]


class Translator:
    """A translator of one rank's batches into Dynamo's RouterEvents.

    Args:
        worker: the worker's id in Dynamo.
        rank: the worker's data-parallel rank.
        left_out: function that is called with the number of events that were not translated. Their field ``locality``
            says that the worker itself does not hold the blocks, or they name an owner. KvRouters do not accept such
            events.
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
        """An encoded event that changes nothing at a router. It removes an empty list of blocks."""

    def batch(self, payload: bytes) -> Batch:
        """Translate the payload of one batch.

        Raises:
            ValueError: the payload is not a batch in kvbus's encoding.
        """
        batch = decode_batch(payload, sys.maxsize)  # the relay has already limited the number of events
        if isinstance(batch, Reason):
            raise ValueError(f"no batch: {batch}")  # noqa: TRY004 - it is the value that is wrong
        local = [event for event in batch.events if _plain(event, "locality") in _HERE and not _owned(event)]
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


def _owned(event: AnyEvent) -> bool:
    """Return whether an event is about blocks that belong to an owner besides the engine."""
    return _plain(event, "ownership") is not None


def _plain(event: AnyEvent, name: str) -> Any:
    """Return the value of a field that kvbus's decoder leaves encoded in an event; None if there is no such field."""
    raw = value(event, name)
    return None if raw is None else decode_value(raw)


TOPIC: Final = b"kv-events"

LATEST: Final = 2**40
"""Timestamp in seconds since 1970 from which on kvbus sends 0 in place of a batch's timestamp.

An engine may send any number as the timestamp, and Dynamo reads it as milliseconds in an integer of 64 bits.
"""

_CACHED: Final = 64
"""Number of translated batches that are kept, so that several connections can send one translation."""

_ranked: Final = msgspec.msgpack.Decoder(tuple[float, msgspec.Raw, int]).decode

_MSGPACK: Final = b"\x01"


class Envelope(msgspec.Struct):
    """The structure that is encoded in the last frame of a message on Dynamo's event plane.

    ``payload`` has the encoded events.
    """

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes


class Numbering:
    """The common part of all connections of one stream: its publisher id, its translator, and the highest event id.

    Args:
        publisher: the publisher id.
        worker: the worker's id in Dynamo.
        rank: the data-parallel rank.
        left_out: function that is called with the number of events that were not translated; see :class:`Translator`.
    """

    def __init__(self, publisher: int, worker: int, rank: int, left_out: Callable[[int], None]) -> None:
        self.publisher = publisher
        self.worker = worker
        self.rank = rank
        self.newest = 0
        """The highest event id that kvbus has used on any connection of the stream."""
        translator = Translator(worker, rank, left_out)
        self.filler = translator.filler
        self.translate = lru_cache(maxsize=_CACHED)(translator.batch)
        """A function that translates a batch, and caches the newest results.

        All connections of a stream send the same batches at about the same time. So most batches are translated only
        once.
        """

    def connection(self) -> Connection:
        """Return an object that numbers the events of a new connection, and translates its messages."""
        return Connection(self)


class Connection:
    """A counter of the event ids of one router's connection, which also translates the connection's messages.

    :meth:`rewrite` gets the messages that kvbus would send to a router of any other kind.
    """

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._id = numbering.newest + 1
        """The event id that was used last on this connection.

        It begins one above every id that another connection has used, so the first event of this connection skips an
        id. A router that already knows this publisher id finds in this way that it may lack events.
        """
        self._seq: int | None = None
        self._encode = msgspec.msgpack.Encoder().encode

    def rewrite(self, data: bytes) -> bytes:
        """Translate messages of kvbus into messages of Dynamo's event plane.

        ``data`` has one or more complete messages in ZMTP's encoding. The result has the same form.
        """
        out = b"".join([self._message(seq, self._numbering.translate(payload)) for seq, payload in _messages(data)])
        self._numbering.newest = max(self._numbering.newest, self._id)
        return out

    def _message(self, seq: int, batch: Batch) -> bytes:
        """Return the encoded message of one batch.

        Each event gets the next event id of this connection. If a batch has no events, its message has no event id, and
        routers ignore the message.
        """
        if self._seq is not None and seq != self._seq + 1:
            self._id += 1
        self._seq = seq
        payload = array_head(len(batch.events)) + b"".join(map(self._with_id, batch.events))
        at = int(batch.ts * 1000) if math.isfinite(batch.ts) and 0 <= batch.ts < LATEST else 0
        publisher = self._numbering.publisher
        envelope = self._encode(Envelope(publisher, seq, at, TOPIC.decode(), payload))
        frame = _MSGPACK + len(envelope).to_bytes(4, "big") + envelope
        return encode_message((TOPIC, publisher.to_bytes(8, "big"), seq.to_bytes(8, "big"), frame))

    def _with_id(self, event: RouterEvent | None) -> bytes:
        if event is None:
            self._id += 1
            event = self._numbering.filler
        self._id += 1
        return event.head + self._id.to_bytes(8, "big") + event.tail


def rank_of(payload: bytes) -> int:
    """Return the data-parallel rank in the payload of a batch. The payload is in kvbus's own encoding."""
    return _ranked(payload)[2]


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the seq and the payload of each encoded message in ``data``."""
    at = 0
    while at < len(data):
        frames = []
        for _ in range(3):
            head = 9 if data[at] & LONG else 2
            end = at + head + int.from_bytes(data[at + 1 : at + head], "big")
            frames.append(data[at + head : end])
            at = end
        yield int.from_bytes(frames[1], "big"), frames[2]
