"""Contradictions between keys that are each valid on their own: the one list of all checks across keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvbus.config import claims, dynamo, fronting, interposing, key_rules, log_sources, logs, parts, topic_rules, topics
from kvbus.config.findings import Findings
from kvbus.config.paths import Path, show
from kvbus.core.wire.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbus.common.errors import Problem
    from kvbus.config.models import Config

_ONE_OF_EACH: Final = {
    "sources": "sources: [{endpoint: tcp://127.0.0.1:5557, replay_endpoint: tcp://127.0.0.1:5558}]",
    "outputs": "outputs: [{endpoint: 'tcp://*:5657', replay_endpoint: 'tcp://*:5658'}]",
}
_OF_ONE_ENGINE: Final = ("endpoint", "replay_endpoint", "snapshot_endpoint", "bind", "api", "slot")


def check(config: Config, origins: Mapping[Path, str], bad: frozenset[Path] = frozenset()) -> list[Problem]:
    """Return every contradiction in a configuration.

    Args:
        config: the configuration.
        origins: where the value of each key path came from.
        bad: keys that are reported already, for which ``config`` holds defaults; this function leaves them out.
    """
    found = Findings(config, origins, bad)
    for rule in (
        _at_least_one,
        _names,
        claims.wildcards,
        claims.ports,
        interposing.interposed,
        fronting.fronted,
        topic_rules.templates,
        _tokens,
        topic_rules.one_topic_each,
        _sources,
        _snapshots,
        _slots,
        _media,
        _discovery,
        log_sources.check,
        key_rules.curve,
        key_rules.libsodium,
        key_rules.tls,
        _carriers,
    ):
        rule(found)
    return found.problems


def _at_least_one(found: Findings) -> None:
    for name, example in _ONE_OF_EACH.items():
        if not getattr(found.config, name) and found.sound((name,), ("interpose",)):
            found.report((name,), "at least one is needed", example=example)


def _names(found: Findings) -> None:
    for section in ("sources", "outputs"):
        first: dict[str, Path] = {}
        for i, item in enumerate(getattr(found.config, section)):
            key: Path = (section, i, "name")
            if not found.sound(key):
                continue
            if item.name in first:
                example = f"name: {item.name}-{i}"
                found.report(key, f"the same name as {show(first[item.name])}", value=item.name, example=example)
            first.setdefault(item.name, key)


def _media(found: Findings) -> None:
    """Refuse a lifetime for blocks that are left out."""
    if found.sound(("without_media",), ("expiring_media",)):
        for i, medium in enumerate(found.config.expiring_media):
            if medium in found.config.without_media:
                found.report(
                    ("expiring_media", i), "left out by without_media", value=medium, example="without_media: []"
                )


def _tokens(found: Findings) -> None:
    """Refuse an output without tokens for routers that hash them: their index would be wrong in silence."""
    for i, output in enumerate(found.config.outputs):
        key: Path = ("outputs", i, "token_ids")
        profile = PROFILES[output.profile]
        if output.token_ids == "drop" and profile.hashes_tokens and found.sound(key, (*key[:-1], "profile")):
            wrong = (
                f"routers of profile {output.profile} hash the tokens themselves: without them they would find no "
                "prompt, and report nothing"
            )
            found.report(key, wrong, value="drop", example="token_ids: keep")


def _snapshots(found: Findings) -> None:
    """Refuse a source's snapshots without a replay, because a gap of one batch must not cost a whole snapshot."""
    for i, source in enumerate(found.config.sources):
        keys: tuple[Path, Path] = (("sources", i, "snapshot_endpoint"), ("sources", i, "replay_endpoint"))
        if found.sound(*keys) and source.snapshot_endpoint is not None and source.replay_endpoint is None:
            example = "replay_endpoint: tcp://127.0.0.1:5558"
            found.report(keys[0], "needs replay_endpoint too", value=source.snapshot_endpoint, example=example)


def _discovery(found: Findings) -> None:
    """Refuse what cannot be where engines are found: keys that only one engine can have, and ports of their own."""
    sources = found.config.sources
    finding = [i for i, source in enumerate(sources) if source.discover is not None]
    if not finding:
        return
    for i in finding:
        for name in _OF_ONE_ENGINE:
            value = getattr(sources[i], name)
            if value != type(sources[i]).model_fields[name].default and found.sound(("sources", i, name)):
                found.report(("sources", i, name), "discover finds it out for each engine", value=value)
    for i, source in enumerate(sources):
        if source.slot is not None and i not in finding:
            wrong = f"{show(('sources', finding[0], 'discover'))} gives out slots as engines come"
            found.report(("sources", i, "slot"), wrong, value=source.slot)
    for i, output in enumerate(found.config.outputs):
        if output.layout == "per_source" and found.sound(("outputs", i, "layout")):
            wrong = "the ports of engines that are found would move as they come and go"
            found.report(("outputs", i, "layout"), wrong, value=output.layout, example="layout: merged")
        template: Path = ("outputs", i, "topic")
        named = {"source", "rank"} & topics.fields(output.topic or "") if found.sound(template) else set()
        if output.layout == "merged" and named:
            wrong = f"one topic for all engines that are found cannot have {{{min(named)}}}"
            found.report(template, wrong, value=output.topic, example="topic: kv@{worker}@{model}")


def _slots(found: Findings) -> None:
    """Refuse two sources in one slot. Where none has a port by its slot, only those that name one have it."""
    if not found.streams_sound():
        return
    taken: dict[int, str] = {}
    by_list = any(output.layout == "per_source" for output in found.config.outputs)
    slots = [each for each in found.config.slots() if by_list or found.config.sources[each[0]].slot is not None]
    for i, _, slot in slots:
        source = found.config.sources[i]
        if slot in taken:
            example = f"slot: {max(last for _, _, last in slots) + 1}"
            wrong = f"slot {slot} is taken by {taken[slot]}"
            found.report(("sources", i, "slot"), wrong, value=source.slot, example=example)
            return
        taken[slot] = source.name


def _carriers(found: Findings) -> None:
    """Refuse a type whose package is missing here, and what an output's type does not have, or cannot carry."""
    for i, output in enumerate(found.config.outputs):
        at = ("outputs", i, "type")
        # zmq needs nothing but what kvbus itself needs, and takes a while to import
        if found.sound(at) and output.type != "zmq" and (lacking := parts.missing(parts.OUTPUTS, output.type)):
            found.report(at, lacking, value=output.type, example="type: zmq")
        for name, wrong, value, example in (*dynamo.wrongs(found.config, i), *logs.wrongs(found.config, i)):
            key: Path = ("outputs", i, *name.split("."))
            if found.sound(at, key):
                found.report(key, wrong, value=value, example=example)


def _sources(found: Findings) -> None:
    """Refuse more sources than there may be."""
    most, key = found.config.limits.max_sources, ("limits", "max_sources")
    if found.streams_sound() and found.sound(("limits",), key):
        count = len(found.config.slots())
        if count > most:
            wrong = f"there are {count} sources, all ranks counted"
            found.report(key, wrong, value=most, example=f"max_sources: {count}")
