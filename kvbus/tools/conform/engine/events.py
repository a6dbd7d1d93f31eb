"""A strict decoder of payloads, as section 6 of docs/spec defines them.

It records each deviation from the specification, and still decodes the rest of the payload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvbus.tools.conform.engine.clauses import Ledger
from kvbus.tools.conform.report import Evidence, Level

MAX_EVENTS: Final = 65_536
MAX_BATCH_BYTES: Final = 16 * 1024 * 1024
MAX_HASH_BYTES: Final = 64
_MAX_TOKEN: Final = 2**32 - 1
_DEVICE: Final = frozenset({"GPU", "DEVICE"})
_MEDIA: Final = _DEVICE | {
    *("CPU", "CPU_PINNED", "CPU_TIER1", "CPU_TIER2", "FS", "DISK", "NVME", "STORAGE"),
    *("OBJ", "EXTERNAL", "REMOTE", "NETWORK", "SHARED"),
}
_PREFIXES: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
POSITIONAL: Final = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
}
"""By type of event: the fields of an event that is sent as an array, in the order of clause 6.2."""
_RANGES: Final = {
    "group_idx": _MAX_TOKEN,
    "kv_cache_spec_sliding_window": _MAX_TOKEN,
    "lora_id": 2**63 - 1,
}
_APART: Final = ("lora_id", "lora_name", "cache_salt")
"""Keys of a store whose values the hashes of its blocks depend on.

Two blocks with the same tokens have different hashes if they differ in one of these values. ``extra_keys`` has the same
effect, but is not here, because it has a value for each block.
"""

Hash = int | bytes
TableKey = tuple[int | None, str, str | None, str | None]
"""The KV-cache group, the medium, the locality and the owner of a block.

The medium is ``GPU`` for every name of the device, such as ``DEVICE``.
"""

_batch: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_any: Final = msgspec.msgpack.Decoder(Any, strict=True).decode
_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class Event:
    """One decoded event.

    Attributes:
        kind: the type of the event.
        table: group, medium, locality and owner of the blocks. If the event clears all media, the medium is empty.
        hashes: hashes of the blocks; an integer hash as an unsigned number of 64 bits.
        parent: hash of the parent of a store's first block; None if that block is the first one of a prompt.
        tokens: token ids of a store.
        block_size: block size of a store.
        apart: values such as a salt, by which all blocks of a store differ from blocks with the same tokens.
        extras: for each block of a store, a value by which only this block differs; empty if the event has none.
        remaining: number of remaining copies of each removed block; None if the event does not say it.
        raw: the bytes of the event.
        where: position in the stream as text, such as ``event 0 of batch 17``.
    """

    kind: str = ""
    table: TableKey = (None, "", None, None)
    hashes: list[Hash] = field(default_factory=list)
    parent: Hash | None = None
    tokens: list[Any] = field(default_factory=list)
    block_size: int = 0
    apart: list[Any] = field(default_factory=list)
    extras: list[Any] = field(default_factory=list)
    remaining: list[Any] | None = None
    raw: bytes = b""
    where: str = ""

    @property
    def evidence(self) -> Evidence:
        """The bytes of the event, as evidence for a verdict."""
        return Evidence(self.where, self.raw)

    def content_of(self, block: int) -> bytes | None:
        """Return bytes that identify the content of one block without its prefix; None if its tokens are unknown.

        ``block`` is the position of the block in the event.
        """
        tokens = self.tokens[block * self.block_size : (block + 1) * self.block_size]
        if not tokens or len(tokens) != self.block_size:
            return None
        return _encode([tokens, self.apart, self.extras[block] if self.extras else None])


@dataclass(slots=True)
class Payload:
    """One decoded payload.

    Attributes:
        rank: the rank as the publisher sent it.
        events: the events that could be decoded.
        empty: whether the payload has no events.
        size: size of the payload in bytes.
    """

    rank: Any
    events: list[Event]
    empty: bool
    size: int

    @property
    def clears_first(self) -> bool:
        """Whether the first event of the payload clears all media."""
        return bool(self.events) and self.events[0].kind == "AllBlocksCleared" and not self.events[0].table[1]


class EventReader:
    """A decoder of the payloads of one stream, which judges them by sections 6, 8, 9 and 12 of docs/spec."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kinds: set[type] = set()
        self._keys: frozenset[str] = frozenset()
        self._sizes: dict[int | None, int] = {}

    def new_epoch(self) -> None:
        """Forget the block size of each KV-cache group, because the sizes may differ in a new epoch."""
        self._sizes.clear()

    def read(self, payload: bytes, seq: int) -> Payload | None:
        """Decode and judge the payload of the message with the seq ``seq``.

        Return None if the payload is not a batch.
        """
        ledger, shown = self._ledger, Evidence(f"payload of batch {seq}", payload)
        ledger.kept("12.1")
        if len(payload) > MAX_BATCH_BYTES:
            ledger.broken("12.1", f"batch {seq} has {len(payload):,} bytes")
        try:
            parts = _batch(payload)
            raws = _batch(parts[1]) if len(parts) > 1 else []
            ts, rank = _any(parts[0]), _any(parts[2]) if len(parts) > 2 else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
            ledger.broken("6.1", f"the payload of batch {seq} is not a MessagePack array [ts, events, rank]", shown)
            return None
        self._check_envelope(parts, ts, rank, seq, shown)
        if len(raws) > MAX_EVENTS:
            ledger.broken("12.1", f"batch {seq} has {len(raws):,} events")
        return Payload(rank, list(self._events(raws, seq)), not raws, len(payload))

    def _check_envelope(self, parts: list[msgspec.Raw], ts: Any, rank: Any, seq: int, shown: Evidence) -> None:
        wrong = ""
        if len(parts) != 3:
            wrong = f"has {len(parts)} elements"
        elif not isinstance(ts, float) or not math.isfinite(ts):
            wrong = f"has {type(ts).__name__} {ts!r:.30} as its timestamp, not a float"
        elif rank is not None and not _is_int(rank):
            wrong = f"has {type(rank).__name__} as its rank"
        self._ledger.judge("6.1", f"batch {seq} {wrong}" if wrong else "", shown)

    def _events(self, raws: list[msgspec.Raw], seq: int) -> Iterator[Event]:
        for at, raw in enumerate(raws):
            event = Event(raw=bytes(raw), where=f"event {at} of batch {seq}")
            try:
                value = _any(event.raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._judge("6.1", event, "is not MessagePack")
                continue
            if self._read_event(event, value):
                yield event

    def _judge(self, number: str, event: Event, wrong: str, level: Level | None = None) -> None:
        """Record an observation about the clause ``number`` in an event.

        ``wrong`` says how the event breaks the clause; it is empty if the event is as the clause requires.
        """
        self._ledger.judge(number, f"{event.where} {wrong}" if wrong else "", event.evidence, level=level)

    def _read_event(self, event: Event, value: Any) -> bool:
        """Decode the fields of an event into ``event``.

        Return False if the event is unusable, or if its type is unknown. Clause 13.1 allows unknown types.
        """
        fields: dict[Any, Any]
        if isinstance(value, dict) and isinstance(value.get("type"), str):
            self._judge("6.2", event, "")
            fields = value
        elif isinstance(value, list) and value and isinstance(value[0], str):
            self._judge("6.2", event, "is an array, not a map")
            names = POSITIONAL.get(value[0], ())
            fields = {"type": value[0], **dict(zip(names, value[1:], strict=False))}
        else:
            self._judge("6.2", event, "has no type")
            return False
        event.kind = fields["type"]
        if event.kind not in {"BlockStored", "BlockRemoved", "AllBlocksCleared"}:
            return False
        self._read_table(event, fields)
        if event.kind == "AllBlocksCleared":
            return True
        self._check_ranges(event, fields)
        if not self._read_hashes(event, fields):
            return False
        if event.kind == "BlockRemoved":
            remaining = fields.get("remaining_copy_counts")
            event.remaining = remaining if isinstance(remaining, list) else None
        else:
            self._read_store(event, fields)
            if fields is value:
                self._check_keys(event, frozenset(map(str, fields)))
        return True

    def _read_table(self, event: Event, fields: dict[Any, Any]) -> None:
        medium, group = fields.get("medium"), fields.get("group_idx")
        name = "" if medium is None and event.kind == "AllBlocksCleared" else "GPU"
        if isinstance(medium, str):
            name = medium.upper()
            self._judge("9.1", event, "" if name in _MEDIA else f"is on {medium!r:.40}")
        elif medium is not None:
            self._judge("9.1", event, f"has {type(medium).__name__} as its medium")
        named = [fields.get(each) for each in ("locality", "ownership")]
        locality, owner = (text if isinstance(text, str) else None for text in named)
        event.table = group if isinstance(group, int) else None, "GPU" if name in _DEVICE else name, locality, owner
        if event.kind != "BlockStored":
            return
        kind = fields.get("kv_cache_spec_kind")
        if group is not None and kind is None:
            self._judge("8.1", event, f"has group_idx {group!r:.20} and no kv_cache_spec_kind", Level.SHOULD)
        elif group is not None:
            self._judge("8.1", event, "")
        elif isinstance(kind, str) and kind not in _PREFIXES:
            self._judge("8.1", event, f"is of kind {kind!r:.40} and has no group_idx")

    def _check_ranges(self, event: Event, fields: dict[Any, Any]) -> None:
        for name, most in _RANGES.items():
            value = fields.get(name)
            if value is not None:
                self._judge("12.3", event, "" if _is_int(value) and 0 <= value <= most else f"has {name} {value!r:.40}")

    def _check_keys(self, event: Event, keys: frozenset[str]) -> None:
        before, self._keys = self._keys, keys | self._keys
        if not before:
            return
        wrong = ""
        if missing := before - keys:
            wrong = f"leaves out {', '.join(sorted(missing)):.80}"
        elif more := keys - before:
            wrong = f"has {', '.join(sorted(more)):.80}, which earlier stores did not have"
        self._judge("6.3", event, wrong)

    def _read_hashes(self, event: Event, fields: dict[Any, Any]) -> bool:
        """Decode the block hashes of an event. Return False if they are missing or invalid."""
        hashes = fields.get("block_hashes")
        if not isinstance(hashes, list):
            self._judge("6.4" if event.kind == "BlockStored" else "6.12", event, "has no block_hashes", Level.MUST)
            return False
        for value in hashes:
            found = self._read_hash(event, value)
            if found is None:
                return False
            event.hashes.append(found)
        return True

    def _read_hash(self, event: Event, value: Any) -> Hash | None:
        wrong = ""
        if isinstance(value, bytes):
            wrong = "" if 0 < len(value) <= MAX_HASH_BYTES else f"has a hash of {len(value)} bytes"
        elif not _is_int(value):
            wrong = f"has {type(value).__name__} as a hash"
        if not wrong:
            self._kinds.add(type(value))
            wrong = "has hashes of another type than earlier events" if len(self._kinds) > 1 else ""
        self._judge("6.6", event, wrong)
        if wrong:
            return None
        return value if isinstance(value, bytes) else int(value) % 2**64

    def _read_store(self, event: Event, fields: dict[Any, Any]) -> None:
        parent, tokens, size = fields.get("parent_block_hash"), fields.get("token_ids"), fields.get("block_size")
        extra = fields.get("extra_keys")
        if parent is not None:
            event.parent = self._read_hash(event, parent)
        event.block_size = size if isinstance(size, int) and _is_int(size) else 0
        event.tokens = tokens if isinstance(tokens, list) else []
        event.apart = [fields[key] for key in _APART if fields.get(key) is not None]
        event.extras = extra if isinstance(extra, list) and len(extra) == len(event.hashes) else []
        wrong = ""
        if not isinstance(tokens, list):
            wrong = "has no token_ids"
        elif event.block_size <= 0:
            wrong = f"has a block_size of {size!r:.20}"
        elif not event.hashes:
            wrong = "stores no block: its block_hashes are empty"
        self._judge("6.4", event, wrong)
        self._check_tokens(event)
        known = self._sizes.setdefault(event.table[0], event.block_size)
        group = "" if event.table[0] is None else f"of group {event.table[0]} "
        wrong = f"{group}has block_size {event.block_size}, after {known}"
        self._judge("8.2", event, "" if known == event.block_size else wrong)

    def _check_tokens(self, event: Event) -> None:
        tokens, blocks, size = event.tokens, len(event.hashes), event.block_size
        if not tokens:
            return
        wrong = f"has {len(tokens)} tokens for {blocks} blocks of {size}"
        self._judge("6.5", event, "" if len(tokens) == blocks * size else wrong)
        if all(isinstance(each, list) and len(each) == 2 for each in tokens):
            tokens = [token for pair in tokens for token in pair]
        bad = [f"has the token {each!r:.40}" for each in tokens if type(each) is not int or not 0 <= each <= _MAX_TOKEN]
        self._judge("6.9", event, bad[0] if bad else "")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
