"""A cache's events as one release's payloads, by its row of :data:`~kvbus.tools.sim.dialects.DIALECTS`."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvbus.tools.sim.cache import Block, Cleared, Event, LiveBlock, Removed, Stored
from kvbus.tools.sim.nodes import RadixNodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvbus.tools.sim.dialects import Dialect


class BatchEncoder:
    """Encode abstract events as the payloads of one engine rank.

    It has state only for ``units="node"``: the blocks of each radix node.

    Args:
        dialect: the release to imitate.
        rank: data-parallel rank in every batch.
        kinds: ``kv_cache_spec_kind`` by group index, for releases that send it.
    """

    def __init__(self, dialect: Dialect, *, rank: int = 0, kinds: tuple[str, ...] = ("full_attention",)) -> None:
        self.dialect: Final = dialect
        self._rank = rank
        self._kinds = kinds
        self._nodes = RadixNodes()

    def encode(self, events: Iterable[Event], now: float) -> list[bytes]:
        """Encode one step's events; `now` is Unix time in seconds. Without events there is no payload."""
        written = [written for event in self._merged(events) for written in self._write(event)]
        if not written:
            return []
        if self.dialect.single_events:
            return [self.batch([event], now) for event in written]
        return [self.batch(written, now)]

    def batch(self, written: list[Any], now: float) -> bytes:
        """Encode a batch of events that have their wire form already."""
        batch = [now, written, self._rank]
        return msgspec.msgpack.encode(batch[: self.dialect.batch_length])

    def entries(self, live: Mapping[tuple[int, str, bytes], LiveBlock]) -> list[dict[str, Any]]:
        """Return a cache's live set as a correct reader of this dialect's stream sees it.

        Returns:
            One entry for each live (group_idx, medium, hash), parents before children: ``hash`` (int, hex for
            bytes, None where one hash covers many blocks), ``group_idx``, ``medium``, ``copies``, ``kind``,
            ``parent``, ``tokens``, ``block_size`` and ``prefix``, the sha256 of the whole prefix (token ids as 4-byte
            little endian). ``prefix`` identifies the content in every dialect.
        """
        dialect = self.dialect
        prefixes = _Prefixes(dialect)
        found: dict[tuple[int, str | None, Any], dict[str, Any]] = {}
        for (group, tier, _), entry in live.items():
            block = entry.block
            medium = dialect.media.get(tier)
            known = None if dialect.units == "node" else _printable(dialect.hash_of(block))
            prefix = prefixes.of(block).hexdigest()
            same = found.get((group, medium, prefix if known is None else known))
            if same is not None:  # equal pages of an unchained dialect
                same["copies"] += entry.copies
                continue
            parent = None if block.parent is None or known is None else dialect.hash_of(block.parent)
            found[group, medium, prefix if known is None else known] = {
                "hash": known,
                "group_idx": group if dialect.groups else None,
                "medium": medium,
                "copies": entry.copies,
                "kind": self._kinds[group] if "kv_cache_spec_kind" in dialect.stored else None,
                "parent": None if parent is None else _printable(parent),
                "tokens": dialect.tokens_of(block),
                "block_size": len(block.tokens),
                "prefix": prefix,
            }
        return list(found.values())

    def _merged(self, events: Iterable[Event]) -> Iterator[Event]:
        """Join successive removals of one tier, for releases with many hashes per event."""
        last: Removed | None = None
        for event in events:
            if isinstance(event, Removed) and self.dialect.removed_units != "page":
                if last is not None and (last.tier, last.group_idx) == (event.tier, event.group_idx):
                    last = replace(last, blocks=last.blocks + event.blocks)
                    continue
                if last is not None:
                    yield last
                last = event
                continue
            if last is not None:
                yield last
                last = None
            yield event
        if last is not None:
            yield last

    def _write(self, event: Event) -> Iterator[Any]:
        if isinstance(event, Cleared):
            self._nodes.clear()
            yield self._tagged("AllBlocksCleared", (), {})
        elif self.dialect.units == "node":
            yield from self._write_nodes(event)
        elif isinstance(event, Removed):
            runs = [event.blocks] if self.dialect.removed_units == "run" else [(b,) for b in event.blocks]
            for run in runs:
                yield self._removed([self.dialect.hash_of(block) for block in run], event.tier, event.group_idx)
        else:
            runs = [event.blocks] if self.dialect.units == "run" else [(b,) for b in event.blocks]
            for run in runs:
                # an unchained page names its predecessor only within its own node
                head = not self.dialect.chained and run[0] is event.blocks[0]
                parent = None if head or run[0].parent is None else self.dialect.hash_of(run[0].parent)
                hashes = [self.dialect.hash_of(block) for block in run]
                yield self._stored(run, hashes, parent, event.tier, event.group_idx)

    def _write_nodes(self, event: Stored | Removed) -> Iterator[Any]:
        hash_of = self.dialect.hash_of
        nodes = self._nodes
        changes = nodes.store(event.blocks) if isinstance(event, Stored) else nodes.remove(event.blocks)
        for stored, run in changes:
            if stored:
                parent = None if run[0].parent is None else hash_of(run[0].parent)
                yield self._stored(run, [hash_of(run[-1])], parent, event.tier, event.group_idx)
            else:
                yield self._removed([hash_of(run[-1])], event.tier, event.group_idx)

    def _stored(self, run: tuple[Block, ...], hashes: list[Any], parent: Any, tier: str, group_idx: int) -> Any:
        dialect = self.dialect
        tenant = run[0].tenant
        tokens = [token for block in run for token in dialect.tokens_of(block)]
        size = len(tokens) // len(hashes)
        adapter = int(tenant.rpartition("-")[2]) if tenant.rpartition("-")[2].isdigit() else None
        values = {
            "block_hashes": hashes,
            "parent_block_hash": parent if dialect.parents else None,
            "token_ids": tokens,
            "block_size": size if dialect.sizes else 0,
            "lora_id": None if "cache_salt" in dialect.stored or dialect.salt_element else adapter,
            "medium": dialect.media.get(tier),
            "lora_name": tenant if tenant and dialect.adapters and "cache_salt" not in dialect.stored else None,
            "extra_keys": self._extra_keys(tenant, parent, len(hashes)),
            "group_idx": group_idx,
            "kv_cache_spec_kind": self._kinds[group_idx],
            "cache_salt": tenant or None,
        }
        extra = ({"cache_salt": tenant},) if dialect.salt_element and tenant else ()
        return self._tagged("BlockStored", dialect.stored, values, *extra)

    def _extra_keys(self, tenant: str, parent: Any, blocks: int) -> list[Any] | None:
        if not self.dialect.parents:
            return None
        if "cache_salt" not in self.dialect.stored:
            return [[tenant] if tenant else None] * blocks
        return [[tenant], *[None] * (blocks - 1)] if tenant and parent is None else None

    def _removed(self, hashes: list[Any], tier: str, group_idx: int) -> Any:
        values = {"block_hashes": hashes, "medium": self.dialect.media.get(tier), "group_idx": group_idx}
        return self._tagged("BlockRemoved", self.dialect.removed, values)

    def _tagged(self, tag: str, fields: tuple[str, ...], values: dict[str, Any], *extra: Any) -> Any:
        if not self.dialect.maps:
            return [tag, *(values.get(name) for name in fields), *extra]
        event = {name: values.get(name) for name in fields}
        omitted = self.dialect.omitted
        return {"type": tag} | {name: v for name, v in event.items() if v is not None or name not in omitted}


class _Prefixes:
    """Running sha256 of every prefix. It hashes each block once."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._known: dict[bytes, Any] = {}

    def of(self, block: Block) -> Any:
        chain = []
        step: Block | None = block
        while step is not None and step.digest not in self._known:
            chain.append(step)
            step = step.parent
        digest = self._known[step.digest] if step is not None else hashlib.sha256()
        for step in reversed(chain):
            digest = digest.copy()
            tokens = self._dialect.tokens_of(step)
            digest.update(struct.pack(f"<{len(tokens)}I", *tokens))
            self._known[step.digest] = digest
        return digest


def _printable(value: int | bytes) -> int | str:
    return value.hex() if isinstance(value, bytes) else value
