"""The wire dialects of engine releases: a table, one row for each release that changed the format.

Positional events always have every field of their row, trailing nulls included. Map events leave out the fields of
`_OMITTED` that are None, as both engines' structs do. The source of each row is the release's own structs; the tests
compare what :mod:`kvbus.tools.sim.encoder` makes of it with captured bytes.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from kvbus.tools.sim.cache import GPU, Block

if TYPE_CHECKING:
    from collections.abc import Mapping

Hashes = Literal["unsigned", "signed", "bytes"]
Units = Literal["run", "page", "node"]

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
    """The event format of one release.

    Attributes:
        name: key in `DIALECTS`; it names the first release with this format.
        stored: fields of BlockStored after the tag.
        removed: fields of BlockRemoved after the tag.
        maps: events are maps tagged by ``type``, else arrays with the tag first.
        omitted: fields that a map leaves out when they are None.
        framing: replay framing of the release.
        batch_length: elements of a batch: 3 with a rank, 2 without (vLLM 0.9.0).
        hashes: form of a 32-byte digest: its low 64 bits unsigned, its high 64 bits signed, or raw bytes.
        chained: False where a hash covers only its own page, so that equal pages collide (SGLang up to 0.5.5).
        units: content of one BlockStored: a run of blocks, one page, or one radix node of any size with one hash.
        removed_units: the same for BlockRemoved.
        parents: False where the parent is always null (llm-d-inference-sim).
        sizes: False where block_size is always 0 (llm-d-inference-sim).
        adapters: False where lora_name is always null.
        salt_element: an 8th element ``{"cache_salt": …}`` on the stores of a tenant (SGLang 0.5.18, 0.5.19).
        clears_first: an epoch begins with AllBlocksCleared (SGLang).
        single_events: a batch has one event (TensorRT-LLM through Dynamo).
        copies: the cache keeps several copies of a hash (vLLM).
        token_offset: number added to every token id.
        media: name of each tier; empty if events have no medium.
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
        """Whether events name a KV-cache group."""
        return "group_idx" in self.stored

    def with_hashes(self, hashes: Hashes) -> Dialect:
        """Return the dialect with another hash form; vLLM from 0.10.2 on has ``bytes`` as an option."""
        return replace(self, hashes=hashes)

    def hash_of(self, block: Block) -> int | bytes:
        """Return the block's hash as it appears on the wire."""
        digest = block.digest
        if not self.chained:
            digest = hashlib.sha256(struct.pack(f"<{len(block.tokens)}Q", *block.tokens)).digest()
        if self.hashes == "bytes":
            return digest
        if self.hashes == "signed":
            return int.from_bytes(digest[:8], "big", signed=True)
        return int.from_bytes(digest[-8:], "big")

    def tokens_of(self, block: Block) -> list[int]:
        """Return the block's token ids as they appear on the wire."""
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
            # before the page events of 0.4.7: one event per radix node, with a hash chained to the node's end
            _sglang("sglang-variable", _BASE, hashes="unsigned", units="node", removed_units="node"),
            _sglang("sglang-0.4.7", _BASE, chained=False),
            _sglang("sglang-0.5.8", _BASE),
            _sglang("sglang-0.5.9", _MEDIUM),
            _sglang("sglang-0.5.18", _MEDIUM, units="run", removed_units="run", salt_element=True),
            _sglang_map("sglang-0.5.20", framing="3"),
            _sglang_map("sglang-0.5.23", "lora_name", framing="4"),
            # as proposed: vLLM's required fields always, and the salt in extra_keys too
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
            # its own publisher, TensorRT-LLM#17023: of vLLM 0.26's fields those that it fills in
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
