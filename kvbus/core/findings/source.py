"""Find the current problems of a source from its state. The module ``engine`` has the texts of these findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kvbus.core.answering import MAX_FILLER
from kvbus.core.findings import engine as catalogue
from kvbus.core.findings.finding import Finding
from kvbus.core.sequencing.epoch import NOTHING
from kvbus.core.sequencing.phases import SEPARATED, Phase
from kvbus.core.source import REANNOUNCED, Source
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import EVENT

MIN_LEFT_OUT: Final = 32
"""Number of left-out events after which kvbus concludes that the model has no group whose blocks belong to prefixes.

A model announces its groups together, so such a group would have come by then. kvbus leaves out the events of all other
groups, such as sliding windows.
"""

MAX_TOPIC: Final = 64
"""Maximum length of a topic in the text of a finding, in characters."""

MAX_TYPES: Final = 3
"""Maximum number of types of unknown events in the text of a finding."""

MIN_REANNOUNCED: Final = 32
MIN_COPIES: Final = 64
"""Number of copies of one block above which the copies are probably announced cache hits.

It is three times the number of copies that any engine is known to keep.
"""

_OWN_ROW: Final = {
    Reason.FRAME_SIZE: catalogue.FRAME_TOO_LARGE,
    Reason.MESSAGE_SIZE: catalogue.MESSAGE_TOO_LARGE,
    Reason.ZMTP: catalogue.ZMTP_BROKEN,
    Reason.TOO_MANY_EVENTS: catalogue.BATCH_TOO_LARGE,
}
_REFUSALS: Final = {
    Reason.FRAME_COUNT: "the messages have no sequence number, so kvbus cannot follow the stream",
    Reason.SEQ_WIDTH: "the messages have no sequence number of 8 bytes",
    Reason.NOT_MSGPACK: "the messages are not msgpack, so they are not KV-cache events",
    Reason.BATCH_SHAPE: "the messages are msgpack, but not batches of KV-cache events",
    Reason.HASH_KIND: "the engine mixes integers and byte strings as block hashes",
}
_OF_BATCHES: Final = frozenset(
    {
        Reason.FRAME_COUNT,
        Reason.SEQ_WIDTH,
        Reason.SEQ_RANGE,
        Reason.NOT_MSGPACK,
        Reason.NESTING,
        Reason.BATCH_SHAPE,
    }
)
"""Reasons of refused messages which suggest that the endpoint is not an engine's event port.

All other reasons concern single events of a batch.
"""

_SAID_ELSEWHERE: Final = frozenset(
    {
        Reason.BLOCK_SIZE,
        Reason.CONFLICT,
        Reason.HASH_COLLISION,
        Reason.INDEX_FULL,
        Reason.OTHER_TOPIC,
        Reason.TOO_MANY_GROUPS,
        Reason.TOO_MANY_OWNERS,
        Reason.UNKNOWN_EVENT,
        REANNOUNCED,
        *_OWN_ROW,
    }
)
"""Reasons of refused or counted events that are left out of the finding about refused messages.

They have a separate finding, or need none. A block with a known hash and other tokens (collision) is only counted, and
sent to routers. A full index makes the source partial.
"""

_RESTART: Final = "the engine restarts"
_RESET: Final = "its cache is reset (vLLM: POST /reset_prefix_cache, SGLang: POST /flush_cache)"
_TIERS: Final = (
    "the cache of an SGLang engine is reset while clears is set to all (a reset of vLLM leaves its other tiers unknown)"
)


def source_findings(source: Source) -> list[Finding]:
    """Return the current findings about a source. A finding that may cause others comes before them."""
    found = stream_findings(source)
    if source.refused_replays:
        outputs = ", ".join(sorted(source.refused_replays))
        found.append(catalogue.REPLAY_TOO_LONG(outputs=outputs, limit=MAX_FILLER))
    if source.sequencer.request_waits:
        found.append(catalogue.REQUEST_WAITS(at=source.location.section))
    if source.partial and source.sequencer.phase is not Phase.CONFLICT and not source.sequencer.replay_of_another:
        found.append(_missing(source))
    return found


def stream_findings(source: Source) -> list[Finding]:
    """Return the findings about the connection to a source's engine and about its messages.

    Findings about missing data are not included.
    """
    return [*_of_connection(source), *_of_live(source), *_of_events(source), *_of_blocks(source)]


def _of_connection(source: Source) -> Iterator[Finding]:
    sequencer, location = source.sequencer, source.location
    if sequencer.phase in SEPARATED:
        if source.unreachable is not None:
            yield source.unreachable
    elif sequencer.phase is Phase.CONFLICT:
        yield catalogue.CONFLICT(at=location.section, endpoint=location.endpoint)
    elif sequencer.replay_of_another:
        facts = {"endpoint": location.endpoint, "replay": location.replay_endpoint}
        yield catalogue.REPLAY_OF_ANOTHER(at=location.section, **facts)
    elif sequencer.history.unanswered:
        yield catalogue.REPLAY_SILENT(at=location.section, endpoint=location.replay_endpoint)
    if source.further_rank is not None:
        yield source.further_rank
    if source.clock_off:
        which = "behind" if source.clock_off > 0 else "ahead"
        yield catalogue.CLOCK_OFF(
            at=location.section, endpoint=location.endpoint, seconds=abs(source.clock_off), which=which
        )


def _of_live(source: Source) -> Iterator[Finding]:
    """Yield the findings which explain why kvbus does not process some or all live batches."""
    topics, section = source.topics, source.location.section
    if topics.elsewhere is not None and not topics.heard and not topics.shared:
        yield catalogue.TOPIC(at=section, prefix=shown(topics.prefix), elsewhere=shown(topics.elsewhere))
    elif source.replay_alone:
        yield catalogue.REPLAY_ALONE(at=section)
    if topics.untold:
        yield catalogue.TOPIC_UNKNOWN(at=section)
    elif topics.second is not None and Reason.OTHER_TOPIC in source.recent():
        yield catalogue.OTHER_TOPIC(at=section, own=shown(topics.own or b""), second=shown(topics.second))


def shown(topic: bytes) -> str:
    """Return a topic as quoted text for display, up to :data:`MAX_TOPIC` characters long."""
    text = ascii(topic.decode(errors="replace"))
    return text if len(text) <= MAX_TOPIC else f"{text[:MAX_TOPIC]}…'"


def _of_events(source: Source) -> Iterator[Finding]:
    rejected, filtered = source.recent(), source.stats.filtered
    size, normalizer, location = source.spec.block_size, source.normalizer, source.location
    wrong = rejected.get(Reason.BLOCK_SIZE)
    if size is not None and wrong:
        own = f" of {normalizer.engine_block_size} tokens" if normalizer.engine_block_size else ""
        yield catalogue.BLOCK_SIZE(count=wrong, size=size, own=own)
    elif size is not None and filtered[Filtered.TAIL] >= MIN_LEFT_OUT and not len(normalizer.index):
        yield catalogue.BLOCK_SIZE_TOO_LARGE(size=size)
    for reason, kind in _OWN_ROW.items():
        if reason in rejected:
            yield kind(at=location.section, endpoint=location.endpoint)
    refused = {reason: count for reason, count in rejected.items() if reason not in _SAID_ELSEWHERE}
    for kind, of_batches in ((catalogue.NOT_EVENTS, True), (catalogue.EVENTS_REFUSED, False)):
        counts = {reason: count for reason, count in refused.items() if (reason in _OF_BATCHES) is of_batches}
        if counts:
            yield kind(at=location.section, count=sum(counts.values()), why=_named(map(Reason, counts)))
    if unknown := rejected.get(Reason.UNKNOWN_EVENT):
        yield catalogue.UNKNOWN_EVENTS(at=location.section, count=unknown, types=_types(source.unknown))


def _types(unknown: Iterable[str]) -> str:
    """Return the types of unknown events, up to :data:`MAX_TYPES`, from the names of unknown events and fields."""
    types = sorted(name.removeprefix(f"{EVENT} ") for name in unknown if name.startswith(f"{EVENT} "))
    shown_types = ", ".join(types[:MAX_TYPES]) or "not kept"
    return shown_types + (f" and {len(types) - MAX_TYPES} more" if len(types) > MAX_TYPES else "")


def _named(reasons: Iterable[Reason]) -> str:
    """Return a text that names all reasons for which messages were refused, in alphabetical order.

    So the order does not change with the counts of the reasons.
    """
    by_name = sorted(reasons)
    named = [_REFUSALS[each] for each in by_name if each in _REFUSALS]
    others = ", ".join(each for each in by_name if each not in _REFUSALS)
    return "; ".join([*named, *([f"reason {others}, see docs/PROTOCOL.md"] if others else [])])


def _of_blocks(source: Source) -> Iterator[Finding]:
    """Yield the findings about a stream whose events are valid but probably not intended.

    With ``kv_cache_report_mode=full``, vLLM announces each cache hit as a store of live blocks. But a second copy that
    the engine has computed is a store of live blocks, too: in a recording without that mode, up to one store in
    thirteen. So such a store proves nothing. kvbus reports many of them, but does not treat them differently.
    """
    stats, normalizer = source.stats, source.normalizer
    if normalizer.only_without_prefix and stats.filtered[Filtered.GROUP] >= MIN_LEFT_OUT:
        yield catalogue.NO_PREFIX()
    stores = source.recent().get(REANNOUNCED, 0)
    if normalizer.counts_copies and stores >= MIN_REANNOUNCED and stats.most_copies >= MIN_COPIES:
        yield catalogue.REANNOUNCED(stores=stores, copies=stats.most_copies)


def _missing(source: Source) -> Finding:
    """Return the finding about the data that a partial source lacks.

    Its remedy says which event makes the source complete again.
    """
    history, at = source.sequencer.history, source.location.section
    ends = f"{_RESTART}, or {_RESET if source.normalizer.clears.empty else _TIERS}"
    if not source.sequencer.partial:
        return _left_out(source, ends)
    before = history.first if 0 < history.first < NOTHING else None
    if history.pending:
        what = f"{_until(before)} missing, and the engine" if before else "the engine"
        return catalogue.HISTORY_UNANSWERED(at=at, what=what, ends=ends)
    if source.lost:
        where = f" before {before:,}" if before else ""
        what = "1 batch was" if source.lost == 1 else f"{source.lost:,} batches were"
        return catalogue.BATCHES_LOST(at=at, what=what, where=where, ends=ends)
    if not source.spec.replay:
        what = _until(before) if before else "something may have been"
        return catalogue.NO_REPLAY(at=at, what=what, ends=ends)
    what, them = _until(before) if before else "earlier batches were", "it" if before == 1 else "them"
    return catalogue.HISTORY_TRIMMED(at=at, what=what, them=them, ends=ends)


def _left_out(source: Source, ends: str) -> Finding:
    """Return the finding that explains why a source lacks blocks although kvbus has received all its batches."""
    refused, spec, at = source.normalizer.refused, source.spec, source.location.section
    if source.normalizer.full:
        return catalogue.INDEX_FULL(
            blocks=spec.max_blocks, size=spec.max_index_bytes, groups=spec.max_groups, ends=ends
        )
    if Reason.TOO_MANY_OWNERS in refused:
        return catalogue.TOO_MANY_OWNERS(owners=spec.max_owners, ends=ends)
    if refused == {Filtered.TOKENLESS}:
        return catalogue.TOKENLESS(at=at, ends=ends)
    if refused:
        return catalogue.STORES_REFUSED(at=at, reasons=", ".join(sorted(refused)), ends=ends)
    if source.needs_tokens and source.normalizer.hash_only:
        return catalogue.HASHES_ALONE(at=at, ends=ends)
    return catalogue.TIER_UNKNOWN(at=at, ends=ends)


def _until(first: int) -> str:
    return "batch 0 was" if first == 1 else f"batches 0 to {first - 1:,} were"
