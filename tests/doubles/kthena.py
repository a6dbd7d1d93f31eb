"""A model of kthena's sidecar, written after its source (volcano-sh/kthena, python/kthena/runtime, 2026).

No package of the sidecar exists. It accepts only events that are arrays with fields of the declared types, and only
messages with the topic ``kv-events``. It ignores seq, rank, group, medium and parent. It stores a block under a hash of
the block's own tokens.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

TOPIC: Final = b"kv-events"


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """The fields of a BlockStored event that kthena's sidecar declares. It ignores all later fields of the array."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """The fields of a BlockRemoved event that kthena's sidecar declares."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """An AllBlocksCleared event. kthena's sidecar then removes the blocks of all ranks."""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KthenaSidecar:
    """The sidecar of one pod, and the blocks that it has stored for the pod.

    Attributes:
        blocks: maps the engine's hash of a block to the block's tokens, under which the sidecar stores the block.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Batch)

    def take(self, topic: bytes, payload: bytes) -> None:
        """Apply one message of the live stream.

        Raises:
            msgspec.ValidationError: the sidecar cannot decode the batch. The real sidecar drops the complete batch.
            ValueError: a store's tokens cannot be divided equally among its hashes. The real sidecar drops the store.
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
