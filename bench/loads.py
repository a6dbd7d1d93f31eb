"""Synthetic engine traffic, encoded before the measurement.

A load is a series of msgpack batches ``[ts, events, rank]`` in vLLM's form: maps, integer hashes, blocks of 16 tokens,
token ids of three bytes. Each sequence of tokens has 256 blocks. Parents are always known, and each hash is stored
once. A load has the same bytes in every process.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Final

import msgspec

SEQUENCE: Final = 256
"""Number of blocks in a sequence, the simulated prompt."""

BLOCK: Final = 16
"""Number of tokens in a block."""

LANES: Final = 8
"""Number of sequences that grow at the same time."""

PROBE: Final = -1.0
"""The ``ts`` of a batch that only tests whether a router is connected."""

HASH: Final = 9
"""Size of an encoded hash in bytes."""

TOKENS: Final = 3 * BLOCK
"""Size of the encoded token ids of a block in bytes."""

_NOT_ZERO: Final = bytes([1, *range(1, 256)])
"""Translation table that replaces a leading zero byte by 1, so that each integer has its shortest msgpack form."""


def _text(*words: str) -> bytes:
    return b"".join(msgspec.msgpack.encode(word) for word in words)


_STORED: Final = b"\x88" + _text("type", "BlockStored", "block_hashes")
_PARENT: Final = _text("parent_block_hash")
_TOKEN_IDS: Final = _text("token_ids")
_STORED_END: Final = (
    _text("block_size")
    + bytes([BLOCK])
    + _text("lora_id")
    + b"\xc0"
    + _text("medium", "GPU")
    + _text("lora_name")
    + b"\xc0"
)
_REMOVED: Final = b"\x83" + _text("type", "BlockRemoved", "block_hashes")
_REMOVED_END: Final = _text("medium", "GPU")


def stamp(payload: bytes, ts: float) -> bytes:
    """Return a batch with another ``ts``."""
    return payload[:2] + struct.pack(">d", ts) + payload[10:]


def stamped(payload: bytes) -> float:
    """Return a batch's ``ts``, which is a float64 in all batches of engines and of kvbus."""
    return float(struct.unpack_from(">d", payload, 2)[0])


def is_empty(payload: bytes) -> bool:
    """Return whether a batch has no events, as a heartbeat has none."""
    return payload[10] == 0x90


def _array(length: int) -> bytes:
    return bytes([0x90 | length]) if length < 16 else b"\xdc" + length.to_bytes(2, "big")


class Sequence:
    """256 consecutive blocks of a prompt, which can be divided into events. The content depends only on the number."""

    def __init__(self, number: int) -> None:
        rng = random.Random(f"kvbus/bench/{number}")
        raw = rng.randbytes(8 * SEQUENCE)
        hashes = bytearray(b"\xcf") * (HASH * SEQUENCE)
        hashes[1::HASH] = raw[0::8].translate(_NOT_ZERO)
        for byte in range(1, 8):
            hashes[1 + byte :: HASH] = raw[byte::8]
        raw = rng.randbytes(2 * SEQUENCE * BLOCK)
        tokens = bytearray(b"\xcd\x00\x00") * (SEQUENCE * BLOCK)
        tokens[1::3], tokens[2::3] = raw[0::2].translate(_NOT_ZERO), raw[1::2]
        self.hashes, self.tokens = bytes(hashes), bytes(tokens)

    def stored(self, first: int, end: int) -> bytes:
        """Return a BlockStored of the blocks from ``first`` up to ``end``."""
        parent = self.hashes[(first - 1) * HASH : first * HASH] if first else b"\xc0"
        hashes = _array(end - first) + self.hashes[first * HASH : end * HASH]
        ids = b"\xdc" + ((end - first) * BLOCK).to_bytes(2, "big") + self.tokens[first * TOKENS : end * TOKENS]
        return b"".join((_STORED, hashes, _PARENT, parent, _TOKEN_IDS, ids, _STORED_END))

    def removed(self, first: int, end: int) -> bytes:
        """Return a BlockRemoved of the blocks from ``first`` up to ``end``, the leaf first."""
        leaf_first = (self.hashes[block * HASH : (block + 1) * HASH] for block in range(end - 1, first - 1, -1))
        return b"".join((_REMOVED, _array(end - first), *leaf_first, _REMOVED_END))


def batch(events: list[bytes], rank: int) -> bytes:
    """Return a batch of encoded events whose ``ts`` is 0."""
    return b"\x93\xcb" + bytes(8) + _array(len(events)) + b"".join(events) + msgspec.msgpack.encode(rank)


def probe(number: int, rank: int) -> bytes:
    """Return a batch with a block that is not part of a load, to test a connection."""
    return stamp(batch([Sequence(-1 - number).stored(0, 1)], rank), PROBE)


def churn(events: int, blocks: int, live: int, rank: int = 0) -> Iterator[bytes]:
    """Yield batches for ever: only stores until ``live`` blocks are live, then equally many removals and stores.

    Args:
        events: number of events in a batch.
        blocks: number of blocks in an event; a divisor of 256.
        live: number of live blocks, at least the 2,048 of the growing sequences.
        rank: the engine's rank.
    """
    numbers = count(rank << 32)
    growing: deque[tuple[Sequence, int]] = deque((Sequence(next(numbers)), 0) for _ in range(LANES))
    finished: deque[Sequence] = deque()
    oldest, left, held = None, 0, 0
    while True:
        full = held + events * blocks > live
        encoded = []
        for _ in range(max(events // 2, 1) if full else events):
            sequence, at = growing.popleft()
            encoded.append(sequence.stored(at, at + blocks))
            if at + blocks == SEQUENCE:
                finished.append(sequence)
                sequence, at = Sequence(next(numbers)), -blocks
            growing.append((sequence, at + blocks))
            if full:
                if oldest is None or not left:
                    oldest, left = finished.popleft(), SEQUENCE
                encoded.append(oldest.removed(left - blocks, left))
                left -= blocks
            else:
                held += blocks
        yield batch(encoded, rank)


def stores(events: int, blocks: int, rank: int = 0) -> Iterator[bytes]:
    """Yield batches of stores for ever."""
    return churn(events, blocks, 1 << 60, rank)
