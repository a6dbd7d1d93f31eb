"""Engines that are found: each entry that discovers is asked once, and what it finds is looked at like the rest."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from kvbus.config import Config, FoundSource, SourceConfig
from kvbus.daemon.discovery import discoverer_of
from kvbus.daemon.found import Listed, with_found
from kvbus.parts.discovery.contract import Carrier, DiscoveryError
from kvbus.parts.log.follower import OTHER_SCHEMA
from kvbus.tools.doctor.findings import Finding, Report, Seen

SECONDS: Final = 15.0
"""For the first answer of a discovery, which has deadlines of its own."""

_INDEX: Final = re.compile(r"^sources\[(\d+)\]")

_DO: Final = {
    "max_sources": "raise limits.max_sources",
    "same_name": "take out what lists it twice, or give one of them another name",
    "same_endpoint": "take out what lists it twice: one publisher is one worker",
    "same_topic": "put {source} and {rank} into the topic of the output with layout: per_topic",
}


async def find(config: Config) -> tuple[Config, Report]:
    """Ask every entry that discovers, and return the configuration with the engines found."""
    report = Report()
    entries = {i: source for i, source in enumerate(config.sources) if source.discover is not None}
    asked = await asyncio.gather(*(_ask(i, source, report) for i, source in entries.items()))
    found = {source.name: listed for source, listed in zip(entries.values(), asked, strict=True)}
    outcome = with_found(config, found, ())
    numbers = {source.name: i for i, source in entries.items()}
    for (entry, engine), reason in outcome.left_out.items():
        cause = f"engine {engine} is found and left out: {reason}"
        report.add([Finding(cause, f"sources[{numbers[entry]}].discover", _DO[reason])])
    return outcome.config, report


async def _ask(index: int, source: SourceConfig, report: Report) -> Listed:
    key, listed = f"sources[{index}].discover", Listed()
    try:
        discoverer = discoverer_of(source, asyncio.Event())
        async with asyncio.timeout(SECONDS), aclosing(discoverer.watch()) as sets:
            engines = await anext(sets)
    except (DiscoveryError, TimeoutError) as error:
        cause = f"{source.name} cannot be asked for engines: {str(error) or 'no answer'}"
        report.add([Finding(cause, key, "correct it; kvbus itself asks again and again")])
        return listed
    listed.take(engines, 0.0)
    names = ", ".join(sorted(listed.engines)) or "no engine"
    report.seen.append(Seen(key, source.name, f"finds {names}"))
    if not engines:
        do = "start an engine, or correct where kvbus searches"
        report.add([Finding(f"{source.name} finds no engine", key, do)])
    if not isinstance(discoverer, Carrier):
        return listed
    if unread := discoverer.counts[OTHER_SCHEMA]:
        cause = f"{source.name} has {unread} records of a schema that this version does not read"
        report.add([Finding(cause, key, "upgrade this kvbus: readers first, and then writers")])
    return Listed()  # there is nobody to be dialled


def in_words_of(config: Config, with_engines: Config, report: Report) -> Report:
    """Return a report about a configuration with engines in it, with the keys that the file has."""
    names = [source.where.partition(":")[0] if isinstance(source, FoundSource) else source.name
             for source in with_engines.sources]  # fmt: skip
    numbers = {source.name: i for i, source in enumerate(config.sources)}

    def key(of: str) -> str:
        return _INDEX.sub(lambda match: f"sources[{numbers[names[int(match[1])]]}]", of)

    return Report(
        [replace(each, key=key(each.key)) for each in report.findings],
        [replace(each, key=key(each.key)) for each in report.seen],
    )
