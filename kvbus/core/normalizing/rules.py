"""The operator's choices for one source."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvbus.core.normalizing.copies import Duplicates


class Rules(msgspec.Struct, frozen=True):
    """The operator's choices for one source. ``block_size`` None: learned from the stream."""

    block_size: int | None = None
    duplicates: Duplicates = "count"
    groups: Literal["prefix", "all"] = "prefix"
    orphans: Literal["pass", "drop"] = "pass"
    without_media: frozenset[str] = frozenset()
    expiring_media: frozenset[str] = frozenset()
    expire_after: float = 3600.0
    clears: Literal["auto", "device", "all"] = "auto"
    max_blocks: int = 20_000_000
    max_groups: int = 64
    max_index_bytes: int = 2**32
