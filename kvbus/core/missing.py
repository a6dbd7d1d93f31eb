"""What is missing of a source that is ``partial``, and what ends that, in words for people."""

from __future__ import annotations

from typing import Final

import msgspec

from kvbus.core.sequencing.epoch import NOTHING
from kvbus.core.sequencing.phases import State
from kvbus.core.source import Source
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import Filtered

_RESTART: Final = "the engine restarts"
_RESET: Final = "its cache is reset (vLLM: POST /reset_prefix_cache, SGLang: POST /flush_cache)"
_TIERS: Final = (
    "the cache of an SGLang is reset, with clears: all here (a reset of a vLLM leaves its other tiers unknown)"
)


class Missing(msgspec.Struct, frozen=True):
    """Why a source is partial.

    Attributes:
        reason: what is missing, and why.
        before: the seq before which something is missing; None where numbers do not say it.
        heals: what ends it.
    """

    reason: str
    before: int | None
    heals: str


def missing(source: Source) -> Missing | None:
    """What is missing of a source; None: nothing is."""
    if not source.partial:
        return None
    sequencer = source.sequencer
    if source.state is State.CONFLICT:
        return Missing("several publishers are on one endpoint", None, "one publisher is left there")
    ends = f"{_RESTART}, or {_RESET if source.normalizer.clears.empty else _TIERS}"
    if not sequencer.partial:
        return Missing(_left_out(source), None, ends)
    before = sequencer.history.first if 0 < sequencer.history.first < NOTHING else None
    if sequencer.history.pending:
        what = f"{_until(before)} missing, and the engine" if before else "the engine"
        return Missing(
            f"{what} has not answered a replay request so far", before, f"it answers one (it is asked again), or {ends}"
        )
    if source.lost:
        where = f" before {before:,}" if before else ""
        return Missing(f"{_number(source.lost)} lost for good{where}", before, ends)
    if not source.spec.replay:
        what = f"{_until(before)} sent" if before else "something may have been sent"
        return Missing(f"{what} while kvbus was not connected, and there is no replay_endpoint", before, ends)
    what = _until(before) if before else "earlier batches were"
    return Missing(f"{what} trimmed from the engine's replay buffer before kvbus asked for them", before, ends)


def _left_out(source: Source) -> str:
    """Why blocks are missing of a source whose batches are all there."""
    refused = source.normalizer.refused
    if source.normalizer.full:
        return f"the index is full: {_limits(source.spec)}"
    if refused == {Filtered.TOKENLESS}:
        return "blocks were stored without tokens, and are known nowhere else: no router gets them"
    if refused:
        return f"the blocks of refused stores are missing (reason {', '.join(sorted(refused))}, see docs/PROTOCOL.md)"
    if source.needs_tokens and source.normalizer.hash_only:
        return (
            "the engine does not say the tokens of some blocks (masked ones of a sliding window, or offloaded ones): "
            "routers that hash tokens do not get these"
        )
    return "a tier that came up after a reset of the cache may hold more than was announced"


def _limits(spec: SourceSpec) -> str:
    return (
        f"what is beyond limits.max_blocks ({spec.max_blocks:,}), limits.max_index_bytes ({spec.max_index_bytes:,}) "
        f"or limits.max_groups ({spec.max_groups:,}) is refused"
    )


def _until(first: int) -> str:
    return "batch 0 was" if first == 1 else f"batches 0 to {first - 1:,} were"


def _number(count: int) -> str:
    return "1 batch was" if count == 1 else f"{count:,} batches were"
