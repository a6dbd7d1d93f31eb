"""The engines that discovery has found, and which of them are sources: decisions alone, nothing is done here.

An engine is known by its name. The newest set of each entry says where it is. One that is listed no longer leaves after
``discovery_grace``, so that an answer in which it is missing for a moment costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvbus.config import Config, FoundRank, FoundSource, SourceConfig, topic_for
from kvbus.parts.discovery.contract import Engine
from kvbus.state.reservations import SeqReservations

log = logging.getLogger("kvbus.daemon.discovery")

LEFT_OUT: Final = ("max_sources", "same_name", "same_endpoint", "same_topic")
"""Why an engine that was found is no source."""


@dataclass(slots=True)
class Listed:
    """What one entry has found.

    Attributes:
        engines: those it lists, and those that it listed a moment ago, by name.
        leaving: when each of the latter leaves.
    """

    engines: dict[str, Engine] = field(default_factory=dict)
    leaving: dict[str, float] = field(default_factory=dict)

    def take(self, engines: Iterable[Engine], leave_at: float) -> None:
        """Take the newest set; what is not in it any more leaves then."""
        now = {engine.name: engine for engine in sorted(engines, key=_order, reverse=True)}
        for name in self.engines.keys() - now.keys():
            self.leaving.setdefault(name, leave_at)
        for name in now:
            self.leaving.pop(name, None)
        self.engines |= now

    def leave(self, now: float) -> None:
        """Forget the engines whose time has come."""
        for name in [name for name, at in self.leaving.items() if at <= now]:
            del self.leaving[name], self.engines[name]


def _order(engine: Engine) -> tuple[str, str]:
    return engine.name, repr(engine.publishers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A configuration with the engines that were found.

    Attributes:
        config: the sources found stand behind the configured ones, in place of the entries that find them.
        left_out: engines that are no source, by entry and name, with the reason.
    """

    config: Config
    left_out: Mapping[tuple[str, str], str]


def with_found(config: Config, found: Mapping[str, Listed], there: Container[str]) -> Outcome:
    """Put the engines found into a configuration.

    Where there is no room for all, those stay that are there; for the rest the order of the entries decides, then the
    name. Of several engines under one name, at one endpoint or under one topic one is a source, and one that is listed
    comes before one that leaves: it may be the same process under its new name.

    Args:
        config: as configured.
        found: what each entry has found, by its name.
        there: the labels of the sources there are.
    """
    templates = [source for source in config.sources if source.discover is not None]
    if not templates:
        return Outcome(config, {})
    fixed = [source for source in config.sources if source.discover is None]
    candidates = [
        (name in listed.leaving, not _is_there(engine, there), number, name)
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
    """What sources have taken of what there is once or to a limit: names, endpoints, topics, and sources at all."""

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
        """The topic of a source on each output that tells its streams apart by topic."""
        return [
            (number, topic_for(output.topic or "", self._config, name, rank))
            for number, output in enumerate(self._config.outputs)
            if output.layout == "per_topic"
        ]

    def refusal(self, engine: Engine) -> str | None:
        """Why an engine is left out; None if it is not."""
        ranks = engine.publishers
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
        """Make it a source."""
        self._names.add(engine.name)
        self._free -= len(engine.publishers)
        for publisher in engine.publishers:
            self._endpoints.add(publisher.endpoint)
            self._topics.update(self._topics_of(engine.name, publisher.rank))


def _labels(name: str, ranks: Sequence[int]) -> list[str]:
    return [f"{name}/{rank}" for rank in ranks] if len(ranks) > 1 else [name]


def _is_there(engine: Engine, there: Container[str]) -> bool:
    return _labels(engine.name, [publisher.rank for publisher in engine.publishers])[0] in there


def _source(template: SourceConfig, engine: Engine) -> FoundSource:
    labels = _labels(engine.name, [publisher.rank for publisher in engine.publishers])
    first = engine.publishers[0]
    return FoundSource.model_construct(
        **{
            **{name: getattr(template, name) for name in SourceConfig.model_fields},
            "name": engine.name,
            "discover": None,
            "endpoint": first.endpoint,
            "replay_endpoint": first.replay_endpoint,
            "data_parallel_size": len(labels),
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
"""The engines that are sources, by entry."""

_KEPT: Final = "found"


class FoundFile:
    """Keeps the engines that were found, with the reservations: a restart goes on with them until discovery answers.

    So the sources are those that the state on disk belongs to, even if discovery cannot be asked after a restart.

    Args:
        reservations: where they are kept.
        config: says whether engines are searched at all.
    """

    def __init__(self, reservations: SeqReservations, config: Config) -> None:
        self._reservations = reservations
        self._searches = any(source.discover is not None for source in config.sources)

    def read(self) -> FoundEngines:
        """Return what was kept; nothing where nothing was, or damaged content."""
        content = self._reservations.kept(_KEPT) if self._searches else None
        if content is None:
            return {}
        try:
            kept = msgspec.json.decode(content, type=FoundEngines)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("the engines that were kept are damaged (%s): engines are found anew", error)
            return {}
        # an engine without a publisher can be no source
        return {name: [engine for engine in engines if engine.publishers] for name, engines in kept.items()}

    def keep(self, found: FoundEngines) -> None:
        """Keep what was found."""
        if self._searches:
            self._reservations.keep(_KEPT, msgspec.json.encode(found))
