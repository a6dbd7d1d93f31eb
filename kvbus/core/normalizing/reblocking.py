"""Cut the engine's blocks into sub-blocks of the output's block size, and count how many blocks contain each sub-block.

A sub-block has a *derived hash*: ``blake2b(msgpack([parent, salt, tokens]), person="kvbus.block.v1")``. Its parent is
the preceding sub-block. So equal prefixes get equal hashes on every kvbus and after every restart, no matter how the
engine divides them into blocks. If the engine's hashes are integers, a derived hash has eight bytes, read as an
unsigned 64-bit integer. If the engine's hashes are bytes, a derived hash has 32 bytes.

Several blocks of the engine may contain the same sub-block, because SGLang's radix nodes overlap. The sub-block is
stored with the first of these blocks, and removed with the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec import Raw

from kvbus.core.blocks.announce import announce, out_parent, removals_of
from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import MERGED, TableKey
from kvbus.core.blocks.live_order import in_order
from kvbus.core.normalizing.block_size import Treatment
from kvbus.core.normalizing.cache import EngineCache
from kvbus.core.types import Hash
from kvbus.core.wire.encoding import decode_value
from kvbus.core.wire.tokens import divide

_encode: Final = msgspec.msgpack.Encoder().encode

SubBlocks = dict[Hash, tuple[Hash | None, Chunk]]
"""A collection of sub-blocks: for each derived hash, the hash of the parent, and the chunk with the sub-block."""


class Reblocking:
    """The handler of one source's sub-blocks: it cuts blocks, and holds removals of sub-blocks back during a batch.

    kvbus sends the removal of a sub-block only at the end of the batch, and only if no later event of the batch stores
    the sub-block again. A later store comes when the engine splits a radix node: it removes the node and stores two new
    ones. If kvbus sent the removal first, a router that keeps a tree would lose all descendants of the removed block.

    Attributes:
        removed: the sub-blocks whose removal is held back, by table.
    """

    def __init__(self, cache: EngineCache) -> None:
        self._cache = cache
        self.removed: dict[TableKey, SubBlocks] = {}

    def cut(self, key: TableKey, chunk: Chunk) -> None:
        """Compute the hashes of the sub-blocks into which a chunk's blocks are cut, and store them in the chunk."""
        sizes = self._cache.stream.sizes.groups[key[0]]
        before = out_parent(self._cache.index, key[0], chunk.parent)
        chunk.reblock_into(derive_chunk(chunk, sizes.detector.base, before), before)

    def add(self, key: TableKey, chunk: Chunk, a: int, b: int) -> list[int]:
        """Count the sub-blocks of the chunk's blocks ``[a, b)`` as live.

        Return the positions of those sub-blocks that routers do not have yet.
        """
        self._cache.index.cut = True
        refs = self._cache.index.table(*key).refs
        derived, per_block = chunk.reblocked()
        new = []
        for at in range(a * per_block, b * per_block):
            name = derived[at]
            count = refs.get(name, 0)
            refs[name] = count + 1
            if not count and self.removed.get(key, {}).pop(name, None) is None:
                new.append(at)
        return new

    def remove(self, key: TableKey, chunk: Chunk, block: Hash) -> None:
        """Remove the sub-blocks of a removed block. A sub-block stays if another live block also contains it."""
        refs = self._cache.index.table(*key).refs
        derived, per_block = chunk.reblocked()
        first = chunk.hashes.index(block) * per_block
        for at in range(first, first + per_block):
            name = derived[at]
            refs[name] -= 1
            if not refs[name]:
                del refs[name]
                self.removed.setdefault(key, {})[name] = (derived[at - 1] if at else chunk.out_parent, chunk)

    def rebuild(self) -> None:
        """Send a clear and announce all live blocks again, because kvbus has learned another block size."""
        cache, index, left_out = self._cache, self._cache.index, self._cache.left_out
        known = {each: removals_of(index.filed(each)) for each in ("named", *MERGED)} if cache.names_cleared else {}
        cache.clear_leaves(lambda residencies="named": known[residencies])
        cache.stats.rebuilds += 1
        treatment = cache.stream.sizes.treatment
        for key, table in index.tables.items():
            table.refs.clear()
            for chunk in table.blocks.values():
                chunk.reblock_into(None, None)
            left_out.take_from(key, table, treatment)
        left_out.give_back(index, treatment)
        for key, chunk, a, b in in_order(index):
            if treatment(key, chunk) is Treatment.REBLOCK:
                if chunk.derived is None:
                    self.cut(key, chunk)
                self.add(key, chunk, a, b)
        index.count()
        left_out.tails.count()
        cache.leaving.extend(announce(index))
        for residencies, events in cache.filed.items():
            events.extend(announce(index.filed(residencies)))


def derive_chunk(chunk: Chunk, base: int, parent: Hash | None) -> list[Hash]:
    """Return the derived hashes of a chunk's sub-blocks of ``base`` tokens.

    ``parent`` is the hash of the sub-block before the first one; None at the beginning of a prompt.
    """
    meta = chunk.meta
    keys = decode_value(chunk.extra_keys) if chunk.extra_keys is not None else None
    as_bytes = isinstance(chunk.hashes[0], bytes)
    per_block = meta.block_size // base
    salt = b""
    derived: list[Hash] = []
    for at, tokens in enumerate(divide(chunk.tokens, base)):
        block, first = divmod(at, per_block)
        if not first:
            key = keys[block] if isinstance(keys, list) and block < len(keys) else None
            salt = _encode((meta.lora_id, meta.lora_name, meta.cache_salt, key))
        parent = derive(parent, Raw(tokens), salt, as_bytes=as_bytes)
        derived.append(parent)
    return derived


def derive(parent: Hash | None, tokens: Sequence[Any] | Raw, salt: bytes, *, as_bytes: bool) -> Hash:
    """Return the derived hash of the sub-block after ``parent``.

    ``salt`` distinguishes equal tokens whose cached values differ (other LoRA adapter, other cache salt).
    """
    size = 32 if as_bytes else 8
    digest = blake2b(_encode((parent, salt, tokens)), digest_size=size, person=b"kvbus.block.v1").digest()
    return digest if as_bytes else int.from_bytes(digest, "big")
