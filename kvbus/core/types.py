"""Definitions that the whole core shares: hashes, media, tiers, and the reasons of rejected and filtered events."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, Literal

from msgspec import UnsetType

Hash = int | bytes
"""The hash by which an engine names a block: a signed or unsigned 64-bit integer, or bytes (vLLM: 32 bytes)."""

MAX_HASH_BYTES: Final = 64
MAX_TOKEN_ID: Final = 2**32 - 1


class Reason(StrEnum):
    """The reason why kvbus rejected a batch or an event of an engine. Metrics have it as the label ``reason``."""

    FRAME_COUNT = "frame_count"
    FRAME_SIZE = "frame_size"
    MESSAGE_SIZE = "message_size"
    ZMTP = "zmtp"
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
    TOO_MANY_OWNERS = "too_many_owners"
    INDEX_FULL = "index_full"
    CONFLICT = "conflict"
    OTHER_TOPIC = "other_topic"


class Filtered(StrEnum):
    """The reason why kvbus counted a valid batch, event or block of an engine. Metrics have it as the label ``reason``.

    kvbus does not send the counted batch, event or block to routers, with these exceptions: ``ORPHAN_PASSED``,
    ``OTHER_RANK``, ``ODD_FIELD`` and ``HASH_ONLY`` are counted and sent. ``OUTLIVED`` counts blocks that kvbus removed
    because their lifetime ended, without an event of the engine.
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


Residencies = Literal["named", "worker", "one"]
"""How routers of a family distinguish the residencies of a block that have the same group and medium.

A residency is a place where the engine keeps a block: a group, a medium, a locality and an owner.

``named``: each residency counts, under its own names. ``worker``: as ``named``, but a missing locality means ``LOCAL``.
``one``: the routers do not know localities and owners, so all these residencies are one block for them.
"""

LOCAL: Final = "LOCAL"
"""The locality of a block that the engine keeps on its own machine (vLLM 0.26 and later)."""


class Refused(StrEnum):
    """The reason why the handshake of a connection failed. Metrics have it as the label ``reason``."""

    KEY = "unknown_key"
    """The connection uses CURVE, and the peer's public key is not in the list of allowed keys."""
    MECHANISM = "mechanism"
    """One side of the connection requires CURVE encryption, and the other side does not use it."""
    PROTOCOL = "protocol"
    """The peer does not speak ZMTP (ZeroMQ's protocol), or it encrypts for a server with another CURVE key."""
    CLOSED = "closed"
    """The peer disconnected during the handshake.

    Either it only tested whether the port is open, or it refused the handshake itself, because of its own check of the
    key or the mechanism.
    """


class Tier(StrEnum):
    """The level of memory on which a block lies, as routers rank it: L1 device, L2 host, L3 disk, L4 external."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    EXTERNAL = "external"


DEVICE_MEDIUM: Final = "GPU"

UNKNOWN_MEDIUM: Final = "?"
"""The key under which the index keeps blocks on every medium that is not in :data:`MEDIA`."""

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
"""Every medium that an engine is known to name, in upper case, with its tier."""

PREFIX_KINDS: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""The kinds of KV-cache groups whose blocks a router can match with a prompt's prefix.

They are values of the engine's field ``kv_cache_spec_kind`` (vLLM 0.22 and later).
"""


def printable(block: Hash | None) -> int | str | None:
    """Return a hash as a value for JSON and for people: an integer unchanged, bytes as a hex string."""
    return block.hex() if isinstance(block, bytes) else block


def as_text(block: Hash | None) -> str | None:
    """Return a hash as a string, for JSON readers that lose digits of 64-bit integers (jq, browsers)."""
    return None if block is None else str(printable(block))


HASH_FORMS: Final[dict[str, Callable[[Hash | None], int | str | None]]] = {"number": printable, "string": as_text}
"""The functions that write hashes in JSON, by the value of the HTTP query parameter ``hashes``.

``number`` leaves integers unchanged, ``string`` makes every hash a string.
"""


def medium_key(medium: str | UnsetType | None) -> str | None:
    """Return a medium's key in the index; None for a name that is not in :data:`MEDIA`.

    The key is the medium's name in upper case, and ``GPU`` for every name of the device. A missing medium means the
    device: vLLM before 0.10.2, SGLang before 0.5.9, TensorRT-LLM and the Dynamo mocker name no medium.
    """
    if medium is None or medium == "GPU" or isinstance(medium, UnsetType):
        return DEVICE_MEDIUM
    upper = medium.upper()
    tier = MEDIA.get(upper)
    if tier is None:
        return None
    return DEVICE_MEDIUM if tier is Tier.DEVICE else upper
