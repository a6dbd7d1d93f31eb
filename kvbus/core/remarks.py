"""What is remarkable about a source's stream although nothing is missing of it, in words for people."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from kvbus.core.source import Source
from kvbus.core.types import Filtered


class Remark(StrEnum):
    """Bounded: these are the only values of the ``remark`` label."""

    NO_PREFIX = "no_prefix"
    REANNOUNCED = "reannounced"


MIN_LEFT_OUT: Final = 32
"""Events of groups without prefixes, before none with prefixes is expected any more: a model's groups come together."""

MIN_REANNOUNCED: Final = 32
MIN_COPIES: Final = 64
"""Copies of one block: three times as many as an engine has been seen to have of any."""


def remarks(source: Source) -> dict[Remark, str]:
    """What is remarkable now.

    A hit announced again (``kv_cache_report_mode=full``) and a copy computed anew are the same event. A captured vLLM
    without that mode announces up to one store in thirteen in this shape, so the shape alone proves nothing, and kvbus
    does not decide by it.
    """
    found = {}
    stats = source.stats
    if source.normalizer.only_without_prefix and stats.filtered[Filtered.GROUP] >= MIN_LEFT_OUT:
        found[Remark.NO_PREFIX] = (
            "no group of this model carries prefixes (sliding window, chunked local, mamba): routers get no block; "
            "groups: all passes them to routers that can use them"
        )
    counts = source.spec.rules.duplicates == "count"
    if counts and stats.reannounced >= MIN_REANNOUNCED and stats.most_copies >= MIN_COPIES:
        found[Remark.REANNOUNCED] = (
            f"{stats.reannounced:,} stores announced whole prefixes that were live, and one block counts "
            f"{stats.most_copies:,} copies: if requests set kv_cache_report_mode=full, blocks that the engine has "
            "evicted stay live at routers; duplicates: ignore is for that mode"
        )
    return found
