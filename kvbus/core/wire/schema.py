"""The structs of events and batches: some for events that an engine sends as maps, and some for events sent as arrays.

The core uses the map structs, which have the form of vLLM 0.33 and SGLang 0.5.20, and the default output sends them.
Fields that an engine did not send are ``UNSET``. Fields that kvbus passes on without reading them (``extra_keys``,
``session_id``, …) stay raw msgpack. The structs reject unknown fields on purpose: the codec then decodes each event of
the batch separately, and keeps the unknown fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvbus.core.types import Hash, Reason

Rank = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Large = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Integers from 0 to 2^63 - 1, for the fields of events that need the largest range.

``Rank``, ``Small`` and ``Large`` are the ranges that the strictest routers accept (Dynamo: i32, u32 and u64; SMG: i64).
A router drops the complete batch if it cannot read one integer.
"""


NO_TOKENS: Final = Raw()
NO_SIZE: Final = -(2**62)


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", forbid_unknown_fields=True, gc=False):
    """The engine stored k blocks in a cache: ``block_hashes[i]`` names tokens ``[i*block_size, (i+1)*block_size)``.

    ``token_ids`` is raw msgpack: an array of k x block_size token ids, or of ``[a, b]`` pairs with EAGLE. The parent of
    block i is block i-1. The parent of block 0 is ``parent_block_hash``; if it is None, block 0 begins a prompt.
    ``UNSET`` means that the engine did not send the field. If it did not send the tokens, ``token_ids`` is
    :data:`NO_TOKENS`. If it did not send the block size, ``block_size`` is :data:`NO_SIZE`.
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
    # kvbus passes the following fields of a store on without interpreting them.
    extra_keys: Raw = UNSET  # type: ignore[assignment]
    locality: Raw = UNSET  # type: ignore[assignment]
    ownership: Raw = UNSET  # type: ignore[assignment]
    session_id: Raw = UNSET  # type: ignore[assignment]
    cache_salt: Raw = UNSET  # type: ignore[assignment]
    lookahead_token_ids: Raw = UNSET  # type: ignore[assignment]


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", forbid_unknown_fields=True, gc=False):
    """The engine removed the named blocks from a medium. If it holds several copies of a block, it removed one of them.

    If ``group_idx`` is set, only the blocks of that group were removed. ``remaining_copy_counts`` is the number of
    copies of each block that remain (vllm#48933).
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
    """A removal of blocks that kvbus announced without tokens. kvbus builds it itself.

    It is encoded like any other removal, but not sent to routers that compute hashes from tokens.
    """


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", forbid_unknown_fields=True):
    """The engine reset its prefix cache. If ``medium`` is set (ATOM), it dropped only the blocks on that medium."""

    medium: str | UnsetType | None = UNSET


class BlockInactive(msgspec.Struct, tag_field="type", tag="BlockInactive"):
    """The engine says that no request uses the named blocks any more. They stay in its cache (vllm#50732).

    No known router reads this event.
    """


Event = BlockStored | BlockRemoved | AllBlocksCleared
"""An event that changes which blocks are live. BlockInactive is not one: kvbus decodes it only to count it."""

CARRIED: Final = ("extra_keys", "locality", "ownership", "session_id", "cache_salt", "lookahead_token_ids")
"""The fields of :class:`BlockStored` that kvbus passes on as raw msgpack, without interpreting them."""

PER_BLOCK: Final = ("extra_keys", "lookahead_token_ids", "mm_keys")
"""Fields of a store that are lists with one entry for each block. If a store is divided, these lists are divided too.

``mm_keys``, which no struct defines, names the images of a prompt that each block holds (TensorRT-LLM#18810).
"""


class StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", forbid_unknown_fields=True, gc=False):
    """BlockStored as an array, as vLLM 0.9.0 to 0.23 and SGLang 0.4.7 to 0.5.19 send it.

    Older versions end the array after an earlier field. The 7th element is ``lora_name`` in vLLM 0.14 and later, and
    ``{"cache_salt": …}`` in SGLang 0.5.18 and 0.5.19.
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
    """BlockRemoved as an array.

    vLLM 0.10.2 and SGLang 0.5.9 added ``medium``, and vLLM 0.20 added ``group_idx``.
    """

    block_hashes: tuple[Hash, ...]
    medium: str | None = None
    group_idx: Small | UnsetType | None = UNSET


class ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    """AllBlocksCleared as an array. It has only the tag, or the tag and a medium (ATOM)."""

    medium: str | None = None


class MapBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch ``[ts, events, rank]`` whose events are maps with only known fields, so that one call can decode it."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared | BlockInactive]
    rank: Rank | None = None


class ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch ``[ts, events, rank]`` whose events are arrays of known length. In vLLM 0.9.0 it has no rank."""

    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    rank: Rank | None = None


class RawBatch(msgspec.Struct, array_like=True):
    """A batch ``[ts, events, rank]`` whose events are not decoded yet."""

    ts: float
    events: list[Raw]
    rank: Rank | None = None


class RawMapBatch(msgspec.Struct):
    """A batch that is a map, as one development version of vLLM sent it. Its events are not decoded yet.

    SGLang's name for the rank (``attn_dp_rank``) is accepted too.
    """

    ts: float
    events: list[Raw]
    data_parallel_rank: Rank | None = None
    attn_dp_rank: Rank | None = None


Extras = dict[str, Raw]
"""Fields of an event that no struct defines, as raw msgpack.

An output that sends events as maps passes them on. Events as arrays cannot contain them.
"""


class Batch(msgspec.Struct, gc=False):
    """One decoded batch.

    Attributes:
        ts: time of the batch, in seconds since 1970.
        events: the events, in the engine's order.
        rank: the data-parallel rank of the publisher; None if the engine sends no rank (vLLM 0.9.0).
        unknown: names of unknown fields and events, limited in number and safe to display. None if there cannot be any,
            because kvbus decoded all events in one call, which accepts only known fields.
        extras: the fields that no struct defines, by the position of their event in ``events``.
        rejects: one reason for each rejected event.
    """

    ts: float
    events: list[Event]
    rank: int | None = None
    unknown: set[str] | None = None
    extras: dict[int, Extras] | None = None
    rejects: list[Reason] = []
