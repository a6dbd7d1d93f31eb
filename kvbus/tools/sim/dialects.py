"""The dialects of engine releases, and the encoder that writes a cache's events in a dialect.

There is a dialect for each release that changed the format. Events that are arrays always have every field of their
dialect, including trailing nulls. Events that are maps leave out the fields of ``omitted`` that are None, as the
structs of both engines do. Each dialect follows the structs of the release. The tests compare the payloads with
captured bytes.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from kvbus.tools.sim.cache import GPU, Block, Cleared, Event, LiveBlock, Removed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


Hashes = Literal["unsigned", "signed", "bytes"]
Units = Literal["run", "page"]

_BASE: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
_MEDIUM: Final = (*_BASE, "medium")
_V14: Final = (*_MEDIUM, "lora_name")
_V18: Final = (*_V14, "extra_keys")
_V20: Final = (*_V18, "group_idx")
_V22: Final = (*_V20, "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
_V26: Final = (*_V22, "locality")
_V30: Final = (*_V26, "ownership", "session_id")
_V33: Final = (*_V30, "lookahead_token_ids")

_OMITTED: Final = frozenset(_V33) - frozenset(_V14)
_SGLANG_OMITTED: Final = frozenset({"medium", "lora_name", "cache_salt", "session_id"})

_VLLM_MEDIA: Final = MappingProxyType({GPU: "GPU", "CPU": "CPU", "DISK": "STORAGE"})
_SGLANG_MEDIA: Final = MappingProxyType({GPU: "GPU", "CPU": "CPU_PINNED", "DISK": "DISK"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The event format of one engine release.

    Attributes:
        name: key in `DIALECTS`: the first release with this format.
        stored: fields of BlockStored after the tag.
        removed: fields of BlockRemoved after the tag.
        maps: whether events are maps tagged by ``type``, not arrays that begin with the tag.
        omitted: fields that a map leaves out if they are None.
        framing: number of frames of each message in the release's replay answers, ``3`` or ``4``; ``sim`` for the form
            of llm-d-inference-sim.
        batch_length: number of elements of a batch: 3 with a rank, 2 without a rank (vLLM 0.9.0).
        hashes: form in which a 32-byte digest is sent: its low 64 bits unsigned, its high 64 bits signed, or raw bytes.
        chained: whether a hash covers the block's complete prefix. If not, equal pages have equal hashes (SGLang up to
            0.5.5).
        units: content of one BlockStored event: ``run`` for several successive blocks, ``page`` for one block.
        removed_units: content of one BlockRemoved event: ``run`` for several blocks, ``page`` for one block.
        parents: whether stores name their parent. If not, the parent is always null (llm-d-inference-sim).
        sizes: whether stores have a block size. If not, block_size is always 0 (llm-d-inference-sim).
        adapters: whether stores name the LoRA adapter. If not, lora_name is always null.
        salt_element: whether a tenant's BlockStored events have an 8th element ``{"cache_salt": …}`` (SGLang 0.5.18,
            0.5.19).
        clears_first: whether an epoch begins with AllBlocksCleared (SGLang).
        single_events: whether each batch has exactly one event (TensorRT-LLM through Dynamo).
        copies: whether the cache may hold several copies of a block with the same hash (vLLM).
        token_offset: number that is added to every token id.
        media: the medium that events name, by tier; empty if events have no medium.
    """

    name: str
    stored: tuple[str, ...]
    removed: tuple[str, ...]
    maps: bool = False
    omitted: frozenset[str] = frozenset()
    framing: Literal["3", "4", "sim"] = "3"
    batch_length: Literal[2, 3] = 3
    hashes: Hashes = "unsigned"
    chained: bool = True
    units: Units = "run"
    removed_units: Units = "page"
    parents: bool = True
    sizes: bool = True
    adapters: bool = True
    salt_element: bool = False
    clears_first: bool = False
    single_events: bool = False
    copies: bool = False
    token_offset: int = 0
    media: Mapping[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> bool:
        """Whether events name the KV-cache group of their blocks."""
        return "group_idx" in self.stored

    def with_hashes(self, hashes: Hashes) -> Dialect:
        """Return the dialect with another form of hashes. vLLM has an option for the form ``bytes`` since 0.10.2."""
        return replace(self, hashes=hashes)

    def hash_of(self, block: Block) -> int | bytes:
        """Return the hash of a block in the form that events have."""
        digest = block.digest
        if not self.chained:
            digest = hashlib.sha256(struct.pack(f"<{len(block.tokens)}Q", *block.tokens)).digest()
        if self.hashes == "bytes":
            return digest
        if self.hashes == "signed":
            return int.from_bytes(digest[:8], "big", signed=True)
        return int.from_bytes(digest[-8:], "big")

    def tokens_of(self, block: Block) -> list[int]:
        """Return the token ids of a block as this dialect's events have them, with ``token_offset`` added."""
        return [token + self.token_offset for token in block.tokens]


def _vllm(name: str, stored: tuple[str, ...], removed: tuple[str, ...], **more: Any) -> Dialect:
    media = _VLLM_MEDIA if "medium" in stored else {}
    return Dialect(name=name, stored=stored, removed=removed, copies=True, media=media, **more)


def _vllm_map(name: str, stored: tuple[str, ...], *removed: str, framing: Literal["3", "4"] = "4") -> Dialect:
    gone = ("block_hashes", "medium", "group_idx", *removed)
    return _vllm(name, stored, gone, maps=True, omitted=_OMITTED, framing=framing)


def _sglang(name: str, stored: tuple[str, ...], **more: Any) -> Dialect:
    medium = "medium" in stored
    return Dialect(
        name=name,
        stored=stored,
        removed=("block_hashes", "medium") if medium else ("block_hashes",),
        clears_first=True,
        media=_SGLANG_MEDIA if medium else {},
        **({"hashes": "signed", "units": "page"} | more),
    )


def _sglang_map(name: str, *extra: str, framing: Literal["3", "4"]) -> Dialect:
    return _sglang(
        name,
        (*_MEDIUM, *extra, "cache_salt", "session_id"),
        maps=True,
        omitted=_SGLANG_OMITTED,
        framing=framing,
        units="run",
        removed_units="run",
    )


DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            _vllm("vllm-0.9.0", _BASE, ("block_hashes",), batch_length=2),
            _vllm("vllm-0.10.2", _MEDIUM, ("block_hashes", "medium")),
            _vllm("vllm-0.14", _V14, ("block_hashes", "medium")),
            _vllm("vllm-0.18", _V18, ("block_hashes", "medium")),
            _vllm("vllm-0.20", _V20, ("block_hashes", "medium", "group_idx")),
            _vllm("vllm-0.22", _V22, ("block_hashes", "medium", "group_idx")),
            _vllm_map("vllm-0.24", _V22, framing="3"),
            _vllm_map("vllm-0.26", _V26, "locality"),
            _vllm_map("vllm-0.30", _V30, "locality", "ownership"),
            _vllm_map("vllm-0.33", _V33, "locality", "ownership"),
            _sglang("sglang-0.4.7", _BASE, chained=False),
            _sglang("sglang-0.5.8", _BASE),
            _sglang("sglang-0.5.9", _MEDIUM),
            _sglang("sglang-0.5.18", _MEDIUM, units="run", removed_units="run", salt_element=True),
            _sglang_map("sglang-0.5.20", framing="3"),
            _sglang_map("sglang-0.5.23", "lora_name", framing="4"),
            # The dialect that sglang#39991 proposes. The fields that vLLM requires are always sent. The salt is
            # sent twice: as cache_salt, and in extra_keys.
            _sglang(
                "sglang-39991",
                (*_V18, "cache_salt", "session_id"),
                maps=True,
                omitted=frozenset({"extra_keys", "cache_salt", "session_id"}),
                framing="4",
                units="run",
                removed_units="run",
                adapters=False,
            ),
            Dialect(
                name="trtllm",
                stored=_BASE,
                removed=("block_hashes",),
                maps=True,
                hashes="signed",
                removed_units="run",
                single_events=True,
            ),
            # TensorRT-LLM's own publisher (TensorRT-LLM#17023) sends only the fields of vLLM 0.26 that it fills in.
            Dialect(
                name="trtllm-native",
                stored=_V14,
                removed=("block_hashes", "medium"),
                maps=True,
                framing="4",
                hashes="signed",
                removed_units="run",
                adapters=False,
                media=MappingProxyType({GPU: "GPU"}),
            ),
            Dialect(
                name="llm-d-sim",
                stored=_V18,
                removed=("block_hashes", "medium"),
                framing="sim",
                removed_units="run",
                parents=False,
                sizes=False,
                media=MappingProxyType({GPU: "GPU"}),
            ),
            Dialect(
                name="dynamo-mocker",
                stored=("block_hashes", "parent_block_hash", "token_ids", "block_size"),
                removed=("block_hashes",),
                maps=True,
                framing="4",
                removed_units="run",
                token_offset=2**31,
            ),
        )
    }
)


class BatchEncoder:
    """The encoder of one rank of a simulated engine.

    It writes the events of the rank's caches as payloads in a dialect.

    Args:
        dialect: the dialect of the payloads.
        rank: data-parallel rank that every batch names.
        kinds: ``kv_cache_spec_kind`` by group index, for releases that send this field.
    """

    def __init__(self, dialect: Dialect, *, rank: int = 0, kinds: tuple[str, ...] = ("full_attention",)) -> None:
        self.dialect: Final = dialect
        self._rank = rank
        self._kinds = kinds

    def encode(self, events: Iterable[Event], now: float) -> list[bytes]:
        """Return the payloads for the events of one engine step; an empty list if there are no events.

        `now` is Unix time in seconds.
        """
        written = [written for event in self._merged(events) for written in self._write(event)]
        if not written:
            return []
        if self.dialect.single_events:
            return [self.batch([event], now) for event in written]
        return [self.batch(written, now)]

    def batch(self, written: list[Any], now: float) -> bytes:
        """Encode events as a payload. The events already have the form of the dialect."""
        batch = [now, written, self._rank]
        return msgspec.msgpack.encode(batch[: self.dialect.batch_length])

    def entries(self, live: Mapping[tuple[int, str, bytes], LiveBlock]) -> list[dict[str, Any]]:
        """Return the live blocks of a cache as a correct reader of this dialect's stream sees them.

        The result has one entry for each combination of group, medium and hash, parents before children. The keys of an
        entry are ``hash`` (a hash of bytes is given as hexadecimal text), ``group_idx``, ``medium``, ``copies``,
        ``kind``, ``parent``, ``tokens``, ``block_size`` and ``prefix``. ``prefix`` is the SHA-256 of all tokens from
        the prompt's beginning to the block's end, each as four bytes, little endian. So it identifies the content of a
        block in every dialect.

        ``live`` has the live blocks by group index, tier and digest.
        """
        dialect = self.dialect
        prefixes = _Prefixes(dialect)
        found: dict[tuple[int, str | None, int | str], dict[str, Any]] = {}
        for (group, tier, _), entry in live.items():
            block = entry.block
            medium = dialect.media.get(tier)
            known = _printable(dialect.hash_of(block))
            prefix = prefixes.of(block).hexdigest()
            same = found.get((group, medium, known))
            # If a hash covers only the block itself and not its prefix, equal blocks of several prompts have one hash.
            if same is not None:
                same["copies"] += entry.copies
                continue
            parent = None if block.parent is None else dialect.hash_of(block.parent)
            found[group, medium, known] = {
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
        """Yield the events of a step.

        If the dialect allows several hashes in one removal, merge successive removals from the same tier and group.
        """
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
            yield self._tagged("AllBlocksCleared", (), {})
        elif isinstance(event, Removed):
            runs = [event.blocks] if self.dialect.removed_units == "run" else [(b,) for b in event.blocks]
            for run in runs:
                yield self._removed([self.dialect.hash_of(block) for block in run], event.tier, event.group_idx)
        else:
            runs = [event.blocks] if self.dialect.units == "run" else [(b,) for b in event.blocks]
            for run in runs:
                # Where hashes do not cover the prefix (early SGLang), a page names its parent only if both are in the
                # same node of SGLang's tree. The first page of an event begins a node, so it names no parent.
                head = not self.dialect.chained and run[0] is event.blocks[0]
                parent = None if head or run[0].parent is None else self.dialect.hash_of(run[0].parent)
                hashes = [self.dialect.hash_of(block) for block in run]
                yield self._stored(run, hashes, parent, event.tier, event.group_idx)

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
    """A cache of the SHA-256 digests of prefixes.

    The digest of a block's prefix continues the digest of its parent's prefix, so the tokens of each block are hashed
    once.
    """

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
