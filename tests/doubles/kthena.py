"""A model of kthena's sidecar, written after its source (volcano-sh/kthena, python/kthena/runtime, 2026).

No package of the sidecar exists, so its source was run once to record what the double has to do
(``tests/doubles/data``). It accepts only events that are arrays with fields of the declared types, and only
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
    """The sidecar of one pod. It finds a block by its tokens, so it forgets all blocks with the tokens of a removed one."""

    def __init__(self) -> None:
        self.twins: set[tuple[int, ...]] = set()
        """Tokens of blocks that the sidecar forgot because another block with the same tokens was removed."""
        self._mapping: dict[int, tuple[int, ...]] = {}
        """The tokens of each block, by the engine's hash. A clear does not empty it."""
        self._stored: dict[int, tuple[int, ...]] = {}
        self._found: set[tuple[int, ...]] = set()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Batch)

    @property
    def blocks(self) -> dict[int, tuple[int, ...]]:
        """The tokens of each block that the sidecar finds, by the engine's hash."""
        return {block: tokens for block, tokens in self._stored.items() if tokens in self._found}

    def take(self, topic: bytes, payload: bytes) -> None:
        """Apply one message of the live stream.

        Raises:
            msgspec.ValidationError: the sidecar cannot decode the batch. The real sidecar drops the complete batch.
            ValueError: a store's tokens cannot be divided equally among its hashes. Like the real sidecar, the double
                drops the store, and has applied all other events of the batch.
        """
        if topic != TOPIC:
            return
        wrong = ""
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                size, rest = divmod(len(event.token_ids), len(event.block_hashes))
                if rest or not size:
                    wrong = f"{len(event.token_ids)} tokens of {len(event.block_hashes)} blocks"
                    continue
                for n, block in enumerate(event.block_hashes):
                    tokens = tuple(event.token_ids[n * size : (n + 1) * size])
                    self._mapping[block] = self._stored[block] = tokens
                    self._found.add(tokens)
                    self.twins.discard(tokens)
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    self._stored.pop(block, None)
                    self._remove(self._mapping.pop(block, ()))
            else:
                self._stored.clear()
                self._found.clear()
        if wrong:
            raise ValueError(wrong)

    def _remove(self, tokens: tuple[int, ...]) -> None:
        if tokens in self._found and tokens in self._stored.values():
            self.twins.add(tokens)
        self._found.discard(tokens)
