"""kthena's sidecar, by the rules of its source (volcano-sh/kthena, python/kthena/runtime, 2026). No package of it
exists.

It accepts only arrays of typed fields, compares each message's topic with ``kv-events``, and ignores seq, rank, group,
medium and parent. It files a block under a hash of the block's own tokens.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

TOPIC: Final = b"kv-events"


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """The fields of a store that the sidecar declares. It ignores the fields after them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """The fields of a removal that the sidecar declares."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """A clear, which empties all ranks."""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KthenaSidecar:
    """The blocks that the sidecar has filed for its pod.

    Attributes:
        blocks: the tokens that a block is filed under, by the engine's hash.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Batch)

    def take(self, topic: bytes, payload: bytes) -> None:
        """Apply a message.

        Raises:
            msgspec.ValidationError: the sidecar cannot decode the batch. The real sidecar drops the complete batch.
            ValueError: a store's tokens cannot be divided among its hashes. The real sidecar drops the store.
        """
        if topic != TOPIC:
            return
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                size, rest = divmod(len(event.token_ids), len(event.block_hashes))
                if rest or not size:
                    raise ValueError(f"{len(event.token_ids)} tokens of {len(event.block_hashes)} blocks")
                for n, block in enumerate(event.block_hashes):
                    self.blocks[block] = tuple(event.token_ids[n * size : (n + 1) * size])
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    self.blocks.pop(block, None)
            else:
                self.blocks.clear()
