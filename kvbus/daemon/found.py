"""The engines that discovery has found, and the decision which engines become sources. This module changes no source.

An engine is identified by its name. Its address is that of the discoverer's newest list. An engine that is missing from
the list is removed only after ``discovery_grace``, so a short absence has no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from kvbus.config import Config, FoundRank, FoundSource, SourceConfig, topic_for
from kvbus.core.findings.bus import ENGINE_INVALID, ENGINE_LEFT_OUT
from kvbus.core.findings.finding import Finding
from kvbus.parts.discovery.contract import Engine
from kvbus.state.reservations import SeqReservations

log = logging.getLogger("kvbus.daemon.discovery")

LEFT_OUT: Final = ("invalid", "max_sources", "same_name", "same_endpoint", "same_topic")
"""The possible reasons why a found engine is not a source."""

MAX_INVALID: Final = 20
"""Maximum number of faulty engines of one ``sources`` entry that have a finding each."""


@dataclass(slots=True)
class Listed:
    """The engines that the discoverer of one ``sources`` entry has found.

    Attributes:
        engines: the engines on the newest list, and the engines that are missing from it but not removed yet, by name.
        leaving: the time of removal of each engine that is missing from the newest list, by name.
    """

    engines: dict[str, Engine] = field(default_factory=dict)
    leaving: dict[str, float] = field(default_factory=dict)

    def take(self, engines: Iterable[Engine], leave_at: float) -> None:
        """Update the engines to the newest list. Engines that are missing from the list are removed at ``leave_at``.

        While an engine has a fault, the ranks that it had before stay, because the list does not say that they ended.
        """
        now = {
            engine.name: _with_earlier(engine, self.engines.get(engine.name))
            for engine in sorted(engines, key=_order, reverse=True)
        }
        for name in self.engines.keys() - now.keys():
            if self.engines[name].publishers:
                self.leaving.setdefault(name, leave_at)
            else:
                del self.engines[name]
        for name in now:
            self.leaving.pop(name, None)
        self.engines |= now

    def leave(self, now: float) -> None:
        """Remove the engines whose time of removal is ``now`` or earlier."""
        for name in [name for name, at in self.leaving.items() if at <= now]:
            del self.leaving[name], self.engines[name]


def _with_earlier(engine: Engine, earlier: Engine | None) -> Engine:
    if not engine.faults or earlier is None or not earlier.publishers:
        return engine
    if not engine.publishers:
        return replace(earlier, faults=engine.faults)
    ranks = {each.rank: each for each in (*earlier.publishers, *engine.publishers)}
    size = max(engine.size, earlier.size)
    return replace(engine, publishers=tuple(ranks[rank] for rank in sorted(ranks)), size=size)


def _order(engine: Engine) -> tuple[str, str]:
    return engine.name, repr(engine.publishers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A configuration in which found engines are sources, and the engines that were left out.

    Attributes:
        config: the configuration. The found sources follow the configured sources. Entries with ``discover`` are
            replaced by the sources that they have found.
        left_out: the reasons why found engines are not sources, by the name of the entry and the name of the engine.
    """

    config: Config
    left_out: Mapping[tuple[str, str], str]


def with_found(config: Config, found: Mapping[str, Listed], present: Container[str]) -> Outcome:
    """Add the found engines to a configuration as sources.

    If several engines have the same name, endpoint or topic, only one of them becomes a source. An engine with more
    ranks than ``limits.max_sources`` leaves room for is left out, and so is an engine without a valid rank. The order
    of preference is:

    1. Engines on the newest list come before engines that are missing from it. A missing engine may be the same process
       as a listed one, under its former name.
    2. Engines that are already sources come before engines that are not.
    3. Otherwise, the order of the ``sources`` entries decides, and within an entry the alphabetical order of the names.

    Args:
        config: the configuration without found engines.
        found: the engines of each ``sources`` entry, by the entry's name.
        present: the labels of the current sources.
    """
    templates = [source for source in config.sources if source.discover is not None]
    if not templates:
        return Outcome(config, {})
    fixed = [source for source in config.sources if source.discover is None]
    candidates = [
        (name in listed.leaving, not _is_present(engine, present), number, name)
        for number, template in enumerate(templates)
        for listed in [found.get(template.name, Listed())]
        for name, engine in listed.engines.items()
    ]
    room = _Room(config, fixed)
    sources: list[tuple[int, str, FoundSource]] = []
    left_out: dict[tuple[str, str], str] = {}
    for _, _, number, name in sorted(candidates):
        template = templates[number]
        engine = found[template.name].engines[name]
        reason = room.refusal(engine)
        if reason is None:
            room.take(engine)
            sources.append((number, name, _source(template, engine)))
        else:
            left_out[template.name, name] = reason
    ordered = (source for _, _, source in sorted(sources, key=lambda each: each[:2]))
    return Outcome(config.model_copy(update={"sources": (*fixed, *ordered)}), left_out)


class _Room:
    """The names, endpoints and topics that sources use already, and the number of sources that can be added."""

    def __init__(self, config: Config, fixed: Sequence[SourceConfig]) -> None:
        streams = config.model_copy(update={"sources": tuple(fixed)}).streams()
        self._config = config
        self._names = {source.name for source in fixed}
        self._endpoints = {stream.endpoint for stream in streams}
        self._free = config.limits.max_sources - len(streams)
        self._topics = {
            topic for stream in streams for topic in self._topics_of(fixed[stream.source_index].name, stream.rank)
        }

    def _topics_of(self, name: str, rank: int) -> list[tuple[int, bytes]]:
        """Return a worker's topic on each output with ``layout: per_topic``, together with the output's number."""
        return [
            (number, topic_for(output.topic or "", self._config, name, rank))
            for number, output in enumerate(self._config.outputs)
            if output.layout == "per_topic"
        ]

    def refusal(self, engine: Engine) -> str | None:
        """Return the reason why an engine cannot become a source; None if it can."""
        ranks = engine.publishers
        if engine.faults and not ranks:
            return "invalid"
        endpoints = {publisher.endpoint for publisher in ranks}
        topics = [topic for publisher in ranks for topic in self._topics_of(engine.name, publisher.rank)]
        if engine.name in self._names:
            return "same_name"
        if endpoints & self._endpoints or len(endpoints) < len(ranks):
            return "same_endpoint"
        if not self._topics.isdisjoint(topics) or len(set(topics)) < len(topics):
            return "same_topic"
        return "max_sources" if len(ranks) > self._free else None

    def take(self, engine: Engine) -> None:
        """Mark an engine's name, endpoints and topics as used."""
        self._names.add(engine.name)
        self._free -= len(engine.publishers)
        for publisher in engine.publishers:
            self._endpoints.add(publisher.endpoint)
            self._topics.update(self._topics_of(engine.name, publisher.rank))


def _is_present(engine: Engine, present: Container[str]) -> bool:
    return any(label in present for label in engine.labels)


def _source(template: SourceConfig, engine: Engine) -> FoundSource:
    first = engine.publishers[0]
    return FoundSource.model_construct(
        **{
            **{name: getattr(template, name) for name in SourceConfig.model_fields},
            "name": engine.name,
            "discover": None,
            "endpoint": first.endpoint,
            "replay_endpoint": first.replay_endpoint,
            "data_parallel_size": max(engine.size, len(engine.publishers)),
            "topic": template.topic or engine.topic or "",
            "api": engine.api,
            "ranks": tuple(
                FoundRank(publisher.rank, publisher.endpoint, publisher.replay_endpoint)
                for publisher in engine.publishers
            ),
            "where": f"{template.name}: {engine.where}",
        }
    )


FoundEngines = dict[str, list[Engine]]
"""The found engines that are sources, by the name of their ``sources`` entry."""

_STATE_KEY: Final = "found"


class FoundFile:
    """The found engines on disk. After a restart, kvbus uses them as sources until the discoverers answer.

    So the sources match the state on disk, even if a discoverer cannot answer after the restart.

    Args:
        reservations: the seq reservations, in whose store the engines are saved.
        config: the configuration. If no entry of ``sources`` has ``discover``, nothing is saved.
    """

    def __init__(self, reservations: SeqReservations, config: Config) -> None:
        self._reservations = reservations
        self._searches = any(source.discover is not None for source in config.sources)

    def read(self) -> FoundEngines:
        """Return the saved engines, by the name of the entry that found them.

        Return an empty dict if no engines are saved, or if the saved data is damaged.
        """
        content = self._reservations.kept(_STATE_KEY) if self._searches else None
        if content is None:
            return {}
        try:
            kept = msgspec.json.decode(content, type=FoundEngines)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("the stored list of engines is damaged (%s): discovery begins without it", error)
            return {}
        # ignore an engine without a publisher, because it cannot be a source
        return {name: [engine for engine in engines if engine.publishers] for name, engines in kept.items()}

    def keep(self, found: FoundEngines) -> None:
        """Save the found engines for the next process, without their faults."""
        if self._searches:
            sound = {name: [replace(engine, faults=()) for engine in engines] for name, engines in found.items()}
            self._reservations.keep(_STATE_KEY, msgspec.json.encode(sound))


_REMEDIES: Final = {
    "max_sources": "raise limits.max_sources",
    "same_name": "remove one of the two entries, or give one another name",
    "same_endpoint": "remove one of the two entries: one publisher is one worker",
    "same_topic": "put {source} and {rank} into the topic of the output with layout: per_topic",
}


def found_findings(
    config: Config, found: Mapping[str, Listed], left_out: Mapping[tuple[str, str], str]
) -> list[Finding]:
    """Return the findings about found engines: those with invalid values, and those that kvbus leaves out.

    Args:
        config: the configuration without found engines.
        found: the engines of each ``sources`` entry, by the entry's name.
        left_out: the reasons, by the name of the entry and the name of the engine. See :class:`Outcome`.
    """
    positions = {source.name: index for index, source in enumerate(config.sources)}
    findings = []
    for entry, listed in found.items():
        faulty = [each for name, each in sorted(listed.engines.items()) if each.faults and name not in listed.leaving]
        for engine in faulty[:MAX_INVALID]:
            more = len(engine.faults) - 1
            facts = {
                "at": f"sources[{positions[entry]}].discover, {engine.name}",
                "name": entry,
                "engine": engine.name,
                "problem": engine.faults[0],
                "more": f" (and {more:,} more)" if more else "",
            }
            findings.append(ENGINE_INVALID(**facts))
    by_entry: dict[str, dict[str, str]] = {}
    for (entry, name), reason in left_out.items():
        if reason != "invalid":
            by_entry.setdefault(entry, {})[name] = reason
    for entry, reasons in by_entry.items():
        causes = sorted(set(reasons.values()))
        facts = {"reason": ", ".join(causes), "do": "; ".join(_REMEDIES[each] for each in causes)}
        at = f"sources[{positions[entry]}].discover"
        findings.append(ENGINE_LEFT_OUT(at=at, count=len(reasons), engine=min(reasons), **facts))
    return findings
