"""Wire structs: the canonical events (maps, as vLLM 0.33 and SGLang 0.5.20 send them) and the positional forms.

The core works with the map structs, and the default output sends them. Fields that an engine did not send are
``UNSET``. Fields that kvbus only carries (``extra_keys``, ``session_id``, …) stay raw msgpack. These structs reject
batches with unknown fields on purpose: the codec then decodes each event separately, and keeps the unknown fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvbus.core.types import Hash, Reason

Rank = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Large = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Integer ranges of the strictest routers (Dynamo: i32, u32 and u64; SMG: i64).

A router drops the complete batch if it cannot read one integer.
"""


NO_TOKENS: Final = Raw()
NO_SIZE: Final = -(2**62)


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", forbid_unknown_fields=True, gc=False):
    """k blocks entered a cache: ``block_hashes[i]`` names tokens ``[i*block_size, (i+1)*block_size)``.

    ``token_ids`` is raw msgpack: an array of k x block_size token ids, or of ``[a, b]`` pairs with EAGLE. The parent of
    block i is block i-1. The parent of block 0 is ``parent_block_hash`` (None: the root). ``UNSET`` means that a field
    was not sent. For required fields that were not sent, tokens are :data:`NO_TOKENS` and the block size is
    :data:`NO_SIZE`.
    """

    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | UnsetType | None = UNSET
    token_ids: Raw = NO_TOKENS
    block_size: int = NO_SIZE
    lora_id: Large | UnsetType | None = UNSET
    medium: str | UnsetType | None = UNSET
    lora_name: str | UnsetType | None = UNSET
    group_idx: Small | UnsetType | None = UNSET
    kv_cache_spec_kind: str | UnsetType | None = UNSET
    kv_cache_spec_sliding_window: Small | UnsetType | None = UNSET
    # carried unchanged
    extra_keys: Raw = UNSET  # type: ignore[assignment]
    locality: Raw = UNSET  # type: ignore[assignment]
    ownership: Raw = UNSET  # type: ignore[assignment]
    session_id: Raw = UNSET  # type: ignore[assignment]
    cache_salt: Raw = UNSET  # type: ignore[assignment]
    lookahead_token_ids: Raw = UNSET  # type: ignore[assignment]


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", forbid_unknown_fields=True, gc=False):
    """One copy of each named block left a medium (of one group), or its last copy did.

    ``remaining_copy_counts`` gives the number of remaining copies of each block (vllm#48933).
    """

    block_hashes: tuple[Hash, ...]
    medium: str | UnsetType | None = UNSET
    group_idx: Small | UnsetType | None = UNSET
    locality: Raw = UNSET  # type: ignore[assignment]
    ownership: Raw = UNSET  # type: ignore[assignment]
    remaining_copy_counts: Raw = UNSET  # type: ignore[assignment]


class HashOnlyRemoved(
    BlockRemoved,
    tag_field="type",
    tag="BlockRemoved",
    forbid_unknown_fields=True,
    gc=False,
):
    """A removal by kvbus of blocks that it announced without tokens. Encoded, it looks like any other removal."""


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", forbid_unknown_fields=True):
    """The engine reset its prefix cache, or dropped the blocks on the ``medium`` that the event names (ATOM)."""

    medium: str | UnsetType | None = UNSET


class BlockInactive(msgspec.Struct, tag_field="type", tag="BlockInactive"):
    """No request uses these blocks any more; they stay in the cache (vllm#50732). No known router reads this event."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
"""Events that change state. BlockInactive is decoded as well, but only counted."""

CARRIED: Final = ("extra_keys", "locality", "ownership", "session_id", "cache_salt", "lookahead_token_ids")
"""Fields of :class:`BlockStored` that kvbus passes on without interpreting them."""

PER_BLOCK: Final = ("extra_keys", "lookahead_token_ids", "mm_keys")
"""Fields that are lists with an entry for each block. They are divided together with the blocks.

No struct defines ``mm_keys``: it names the images of a prompt that each block holds (TensorRT-LLM#18810).
"""


class StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", forbid_unknown_fields=True, gc=False):
    """Positional BlockStored, vLLM 0.9.0 to 0.23 and SGLang 0.4.7 to 0.5.19: each version sends a prefix of it.

    The 7th element is ``lora_name`` in vLLM 0.14 and later and ``{"cache_salt": …}`` in SGLang 0.5.18 and 0.5.19.
    """

    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    token_ids: Raw
    block_size: int
    lora_id: Large | None = None
    medium: str | None = None
    lora_name: str | dict[str, Any] | None = None
    extra_keys: Raw = UNSET  # type: ignore[assignment]
    group_idx: Small | UnsetType | None = UNSET
    kv_cache_spec_kind: str | UnsetType | None = UNSET
    kv_cache_spec_sliding_window: Small | UnsetType | None = UNSET


class RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", forbid_unknown_fields=True, gc=False):
    """Positional BlockRemoved.

    ``medium`` is sent from vLLM 0.10.2 and SGLang 0.5.9 on, ``group_idx`` from vLLM 0.20 on.
    """

    block_hashes: tuple[Hash, ...]
    medium: str | None = None
    group_idx: Small | UnsetType | None = UNSET


class ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    """Positional AllBlocksCleared: only the tag, or the tag and a medium (ATOM)."""

    medium: str | None = None


class MapBatch(msgspec.Struct, array_like=True, gc=False):
    """``[ts, events, rank]`` of maps with known fields: decoded by one call."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared | BlockInactive]
    rank: Rank | None = None


class ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    """``[ts, events, rank]`` (vLLM 0.9.0: no rank) of positional events of known length."""

    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    rank: Rank | None = None


class RawBatch(msgspec.Struct, array_like=True):
    """The envelope, with undecoded events."""

    ts: float
    events: list[Raw]
    rank: Rank | None = None


class RawMapBatch(msgspec.Struct):
    """The envelope as a map, as one development version of vLLM sent it. SGLang's name for the rank is accepted too."""

    ts: float
    events: list[Raw]
    data_parallel_rank: Rank | None = None
    attn_dp_rank: Rank | None = None


Extras = dict[str, Raw]
"""Fields that no struct defines, as raw msgpack. They are sent on if the output's encoding has a place for them
(maps)."""


class Batch(msgspec.Struct):
    """One decoded batch.

    Attributes:
        ts: time of the batch, in seconds since 1970.
        events: the events, in the engine's order.
        rank: None if the engine sends no rank (vLLM 0.9.0).
        unknown: names of unknown fields and events, limited in number and safe to display. None if one call decoded all
            events.
        extras: the fields that this version does not know, by the position of their event.
        rejects: one reason for each rejected event.
    """

    ts: float
    events: list[Event]
    rank: int | None = None
    unknown: set[str] | None = None
    extras: dict[int, Extras] | None = None
    rejects: list[Reason] = []
