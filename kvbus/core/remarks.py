"""What is wrong with a source, or remarkable about its stream, in words for people: one sentence each.

Log, ``/sources``, the status page and ``kvbus doctor`` all take their sentences from here. What is missing of a partial
source is in :mod:`kvbus.core.missing`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kvbus.core.missing import missing
from kvbus.core.outputs.replay_answer import MAX_FILLER
from kvbus.core.sequencing.phases import SEPARATED, Phase
from kvbus.core.source import Source
from kvbus.core.types import Filtered, Reason


class Remark(StrEnum):
    """Bounded: these are the only values of the ``remark`` label."""

    UNREACHABLE = "unreachable"
    CONFLICT = "conflict"
    TOPIC = "topic"
    OTHER_TOPIC = "other_topic"
    REPLAY_ALONE = "replay_alone"
    REPLAY_SILENT = "replay_silent"
    BLOCK_SIZE = "block_size"
    REFUSED = "refused"
    EVENTS_REFUSED = "events_refused"
    NO_PREFIX = "no_prefix"
    REANNOUNCED = "reannounced"
    REPLAY_TOO_LONG = "replay_too_long"


MIN_LEFT_OUT: Final = 32
"""Events of groups without prefixes, before none with prefixes is expected any more: a model's groups come together."""

MAX_TOPIC: Final = 64
"""Characters of a topic that are shown."""

MIN_REANNOUNCED: Final = 32
MIN_COPIES: Final = 64
"""Copies of one block: three times as many as an engine has been seen to have of any."""


class About(NamedTuple):
    """What a remark is about.

    Attributes:
        key: the configuration key that it concerns.
        do: what to do about it.
    """

    key: str
    do: str


ABOUT: Final = {
    Remark.UNREACHABLE: About("sources[].endpoint", "start the engine, or correct the endpoint"),
    Remark.CONFLICT: About("sources[].endpoint", "give each engine and each rank a source of its own"),
    Remark.TOPIC: About("sources[].topic", "name the topic that the engine publishes under, or leave it empty"),
    Remark.OTHER_TOPIC: About(
        "sources[].topic", "give each topic of that endpoint a source of its own, with its whole name as topic"
    ),
    Remark.REPLAY_ALONE: About("sources[].endpoint", "name the event port of the engine whose replay this is"),
    Remark.REPLAY_SILENT: About("sources[].replay_endpoint", "name the replay port of this engine and rank"),
    Remark.BLOCK_SIZE: About("block_size", "set it to the engine's, or to auto"),
    Remark.REFUSED: About("sources[].endpoint", "name an engine's event port; kvbus record keeps what comes"),
    Remark.EVENTS_REFUSED: About(
        "sources[].endpoint", "look the reason up in docs/PROTOCOL.md; kvbus record keeps what comes, for a report"
    ),
    Remark.NO_PREFIX: About("groups", "groups: all, if the routers can use such blocks"),
    Remark.REANNOUNCED: About("duplicates", "duplicates: ignore, if requests set kv_cache_report_mode=full"),
    Remark.REPLAY_TOO_LONG: About(
        "outputs[].curve_client_keys",
        "give each router a CURVE key (curve_client_keys) or an output of its own, and restart the routers",
    ),
}

TWO_PUBLISHERS: Final = "several publishers send on one endpoint"

_REFUSALS: Final = {
    Reason.FRAME_COUNT: "messages without a sequence number are no stream that kvbus can follow",
    Reason.SEQ_WIDTH: "its messages have no sequence number of 8 bytes",
    Reason.FRAME_SIZE: "batches are larger than limits.max_frame_bytes",
    Reason.TOO_MANY_EVENTS: "batches hold more events than limits.max_events",
    Reason.NOT_MSGPACK: "what comes is no msgpack, so no KV-cache events",
    Reason.BATCH_SHAPE: "what comes is msgpack and no batch of KV-cache events",
    Reason.HASH_KIND: "the engine mixes integers and byte strings as block hashes",
}
_OF_BATCHES: Final = frozenset(
    {
        Reason.FRAME_COUNT,
        Reason.FRAME_SIZE,
        Reason.SEQ_WIDTH,
        Reason.SEQ_RANGE,
        Reason.NOT_MSGPACK,
        Reason.NESTING,
        Reason.BATCH_SHAPE,
        Reason.TOO_MANY_EVENTS,
        Reason.UNKNOWN_EVENT,
    }
)
"""Reasons that show that an endpoint may not be an engine's event port. One event is refused for the other reasons."""

_SAID_ELSEWHERE: Final = frozenset(
    {
        Reason.BLOCK_SIZE,
        Reason.CONFLICT,
        Reason.HASH_COLLISION,
        Reason.INDEX_FULL,
        Reason.OTHER_TOPIC,
        Reason.TOO_MANY_GROUPS,
    }
)
"""A collision is counted and passed on; a full index is what the source is partial for."""


def remarks(source: Source) -> dict[Remark, str]:
    """What is to be said now, the cause of other things first.

    A hit announced again (``kv_cache_report_mode=full``) and a copy computed anew are the same event. A captured vLLM
    without that mode announces up to one store in thirteen in this shape, so the shape alone proves nothing, and kvbus
    does not decide by it.
    """
    stats = source.stats
    found = _of_connection(source) | _of_live(source)
    if stats.rejected or source.spec.block_size is not None:
        found |= _of_events(source)
    if source.normalizer.only_without_prefix and stats.filtered[Filtered.GROUP] >= MIN_LEFT_OUT:
        found[Remark.NO_PREFIX] = (
            "no group of this model carries prefixes (sliding window, chunked local, mamba): routers get no block; "
            "groups: all passes them to routers that can use them"
        )
    if source.normalizer.counts_copies and stats.reannounced >= MIN_REANNOUNCED and stats.most_copies >= MIN_COPIES:
        found[Remark.REANNOUNCED] = (
            f"{stats.reannounced:,} stores announced whole prefixes that were live, and one block counts "
            f"{stats.most_copies:,} copies: if requests set kv_cache_report_mode=full, blocks that the engine has "
            "evicted stay live at routers; duplicates: ignore is for that mode"
        )
    if source.refused_replays:
        found[Remark.REPLAY_TOO_LONG] = (
            f"a router of output {', '.join(sorted(source.refused_replays))} lacks blocks: its replay from 0 needs "
            f"more than {MAX_FILLER:,} empty batches, the router refuses a shorter answer, and kvbus cannot tell which "
            "router at its address has asked"
        )
    return found


class Said(msgspec.Struct, frozen=True):
    """One reason, whole: a remark, or why the source is partial."""

    about: str
    key: str
    text: str
    do: str


_WAITS: Final = Said(
    "request_waits",
    "sources[].replay_endpoint",
    "a request to the engine waits in kvbus: file descriptors are left for no more than those under way",
    "nothing: it is sent in its turn, the oldest first; with a higher limit (ulimit -n) more go at a time",
)
"""No remark: it passes by itself, and of a thousand sources that are asked at once nearly all wait for a moment."""


def reasons(source: Source) -> list[Said]:
    """Everything that is to be said of a source, and what to do about it."""
    said = [Said(str(remark), *_about(remark, text)) for remark, text in remarks(source).items()]
    if source.sequencer.request_waits:
        said.append(_WAITS)
    why = missing(source)
    if why is not None and source.sequencer.phase is not Phase.CONFLICT:
        said.append(Said("partial", "sources[].replay_endpoint", f"partial: {why.reason}", f"ends when {why.heals}"))
    return said


def _about(remark: Remark, text: str) -> tuple[str, str, str]:
    return ABOUT[remark].key, text, ABOUT[remark].do


def _of_connection(source: Source) -> dict[Remark, str]:
    found: dict[Remark, str] = {}
    sequencer = source.sequencer
    if sequencer.phase in SEPARATED:
        if source.unreachable:
            found[Remark.UNREACHABLE] = f"no connection: {source.unreachable}"
    elif sequencer.phase is Phase.CONFLICT:
        found[Remark.CONFLICT] = f"{TWO_PUBLISHERS}: nothing is taken in until one of them is left there"
    elif sequencer.history.unanswered:
        found[Remark.REPLAY_SILENT] = (
            "replay_endpoint does not answer: is it the engine's, and this rank's? What is missing cannot be had until "
            "it does"
        )
    return found


def _of_live(source: Source) -> dict[Remark, str]:
    """Say why live batches are not taken in, or not all of them."""
    found: dict[Remark, str] = {}
    topics = source.topics
    if topics.elsewhere is not None and not topics.heard and not topics.shared:
        found[Remark.TOPIC] = (
            f"no live batch comes under topic {_shown(topics.prefix)}: the engine publishes under "
            f"{_shown(topics.elsewhere)}. At most its replay brings batches, and late"
        )
    elif source.replay_alone:
        found[Remark.REPLAY_ALONE] = (
            "batches come by the replay alone, late, and none comes live: is endpoint the event port of the engine "
            "that replay_endpoint belongs to?"
        )
    if topics.untold:
        found[Remark.OTHER_TOPIC] = (
            "the socket has several topics, and replay answers name none: nothing is taken in from them, and what is "
            "missed is lost"
        )
    elif topics.second is not None:
        found[Remark.OTHER_TOPIC] = (
            f"the engine publishes several streams: topic {_shown(topics.own or b'')} is read, and batches under "
            f"{_shown(topics.second)} are refused"
        )
    return found


def _shown(topic: bytes) -> str:
    text = ascii(topic.decode(errors="replace"))
    return text if len(text) <= MAX_TOPIC else f"{text[:MAX_TOPIC]}…'"


def _of_events(source: Source) -> dict[Remark, str]:
    found = {}
    stats, size = source.stats, source.spec.block_size
    normalizer = source.normalizer
    wrong, tails = stats.rejected[Reason.BLOCK_SIZE], stats.filtered[Filtered.TAIL]
    if size is not None and wrong:
        own = f" of {normalizer.engine_block_size} tokens" if normalizer.engine_block_size else ""
        found[Remark.BLOCK_SIZE] = f"events refused ({wrong:,}): block_size is {size}, and the engine has blocks{own}"
    elif size is not None and tails >= MIN_LEFT_OUT and not len(normalizer.index):
        found[Remark.BLOCK_SIZE] = f"every block is left out: block_size is {size}, and the engine's blocks are smaller"
    refused = {reason: count for reason, count in stats.rejected.items() if count and reason not in _SAID_ELSEWHERE}
    for remark, whole in ((Remark.REFUSED, True), (Remark.EVENTS_REFUSED, False)):
        counts = {reason: count for reason, count in refused.items() if (reason in _OF_BATCHES) is whole}
        if counts:
            most = max(counts, key=counts.__getitem__)
            why = _REFUSALS.get(Reason(most), f"reason {most}, see docs/PROTOCOL.md")
            found[remark] = f"events or batches refused ({sum(counts.values()):,}): {why}"
    return found
