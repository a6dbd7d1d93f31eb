"""Shared definitions of the core: hashes, media and tiers, reasons for rejecting or filtering."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from msgspec import UnsetType

Hash = int | bytes
"""A block's identity as its engine names it: a signed or unsigned 64-bit integer, or raw bytes (vLLM: 32 bytes)."""

MAX_HASH_BYTES: Final = 64
MAX_TOKEN_ID: Final = 2**32 - 1


class Reason(StrEnum):
    """The reason why a batch or an event was rejected. The ``reason`` label has no other values."""

    FRAME_COUNT = "frame_count"
    FRAME_SIZE = "frame_size"
    SEQ_WIDTH = "seq_width"
    SEQ_RANGE = "seq_range"
    NOT_MSGPACK = "not_msgpack"
    NESTING = "nesting"
    BATCH_SHAPE = "batch_shape"
    TOO_MANY_EVENTS = "too_many_events"
    UNKNOWN_EVENT = "unknown_event"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    INTEGER_RANGE = "integer_range"
    TOKEN_RANGE = "token_range"
    TOKEN_COUNT = "token_count"
    HASH_KIND = "hash_kind"
    HASH_COLLISION = "hash_collision"
    BLOCK_SIZE = "block_size"
    DUPLICATE_HASH = "duplicate_hash"
    SELF_PARENT = "self_parent"
    UNKNOWN_MEDIUM = "unknown_medium"
    TOO_MANY_GROUPS = "too_many_groups"
    INDEX_FULL = "index_full"
    CONFLICT = "conflict"
    OTHER_TOPIC = "other_topic"


class Filtered(StrEnum):
    """Observations about valid batches, events or blocks. No other values exist, as for :class:`Reason`.

    They are left out, except for ``ORPHAN_PASSED``, ``OTHER_RANK``, ``ODD_FIELD`` and ``HASH_ONLY``: these are counted
    and sent. ``OUTLIVED`` blocks are removed without an event of the engine.
    """

    GROUP = "group"
    MEDIUM = "medium"
    COARSE = "coarse"
    TAIL = "tail"
    COPY = "copy"
    NO_HASHES = "no_hashes"
    TOKENLESS = "tokenless"
    HASH_ONLY = "hash_only"
    UNKNOWN_BLOCK = "unknown_block"
    ORPHAN_PASSED = "orphan_passed"
    ORPHAN_DROPPED = "orphan_dropped"
    OTHER_RANK = "other_rank"
    OLD_EPOCH = "old_epoch"
    INACTIVE = "inactive"
    OUTLIVED = "outlived"
    ODD_FIELD = "odd_field"
    TOPIC = "topic"


class Refused(StrEnum):
    """The reason why the handshake of a connection failed. No other values exist, as for :class:`Reason`."""

    KEY = "unknown_key"
    """CURVE is used, and the public key is not allowed."""
    MECHANISM = "mechanism"
    """One side wants CURVE and the other does not."""
    PROTOCOL = "protocol"
    """The peer does not speak ZMTP, or it is a CURVE peer with a wrong public key of the server."""
    CLOSED = "closed"
    """The peer disconnected during the handshake: it probed the port, or it noticed one of the above first."""


class Tier(StrEnum):
    """The level at which a block lies, as routers rank it: L1 device, L2 host, L3 disk, L4 external."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    EXTERNAL = "external"


DEVICE_MEDIUM: Final = "GPU"

UNKNOWN_MEDIUM: Final = "?"
"""Stands for every medium that is not among :data:`MEDIA`."""

MEDIA: Final[dict[str, Tier]] = {
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "FS": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "OBJ": Tier.EXTERNAL,
    "EXTERNAL": Tier.EXTERNAL,
    "REMOTE": Tier.EXTERNAL,
    "NETWORK": Tier.EXTERNAL,
    "SHARED": Tier.EXTERNAL,
}
"""Every medium that engines are known to name (upper-cased), with its tier."""

PREFIX_KINDS: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""``kv_cache_spec_kind`` values whose blocks a prefix can be matched against (vLLM 0.22 and later)."""


def printable(block: Hash | None) -> int | str | None:
    """Return a hash for people and JSON: integers unchanged, bytes as a hex string."""
    return block.hex() if isinstance(block, bytes) else block


def as_text(block: Hash | None) -> str | None:
    """Return a hash as text, for readers that store every number as a double (jq, browsers)."""
    return None if block is None else str(printable(block))


HASH_FORMS: Final[dict[str, Callable[[Hash | None], int | str | None]]] = {"number": printable, "string": as_text}
"""The forms of hashes in JSON: integers unchanged, or always text."""


def medium_key(medium: str | UnsetType | None) -> str | None:
    """Return a medium's index key: its upper-cased name, ``GPU`` for every device name; None if unknown.

    A missing medium means device (vLLM before 0.10.2, SGLang before 0.5.9, TensorRT-LLM, the Dynamo mocker).
    """
    if medium is None or medium == "GPU" or isinstance(medium, UnsetType):
        return DEVICE_MEDIUM
    upper = medium.upper()
    tier = MEDIA.get(upper)
    if tier is None:
        return None
    return DEVICE_MEDIUM if tier is Tier.DEVICE else upper
