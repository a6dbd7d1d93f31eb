"""What a new configuration changes in a running daemon, and whether it may: decisions alone, nothing is done here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from kvbus.config import Config, SourceStream
from kvbus.errors import ConfigError, Problem
from kvbus.transport.curve import Curve

RELOADABLE: Final = frozenset({"sources", "log_level", "shutdown_timeout", "key_reload_interval"})
"""Keys that a reload may change; everything else takes a restart."""


@dataclass(frozen=True, slots=True)
class Change:
    """The way from one configuration to another.

    Attributes:
        config: the new configuration.
        added: streams of sources in slots that were free.
        changed: streams of sources that take the place of others, or that have no connection yet.
        removed: slots that become free.
    """

    config: Config
    added: tuple[SourceStream, ...]
    changed: tuple[SourceStream, ...]
    removed: tuple[int, ...]

    @property
    def replaced(self) -> tuple[SourceStream, ...]:
        """The streams whose sources begin anew."""
        return *self.changed, *self.added


def change_to(running: Config, wanted: Config, is_open: Callable[[int], bool]) -> Change:
    """Compare two configurations.

    Args:
        running: the configuration in force.
        wanted: the new configuration.
        is_open: says whether the source in a slot has a connection.

    Raises:
        ConfigError: the new configuration changes what a reload cannot change. It names every such key.
    """
    refuse(running, wanted)
    old = {stream.index: stream for stream in running.streams()}
    new = {stream.index: stream for stream in wanted.streams()}
    return Change(
        wanted,
        added=tuple(new[slot] for slot in new if slot not in old),
        changed=tuple(
            stream for slot, stream in new.items() if slot in old and not (_same(old[slot], stream) and is_open(slot))
        ),
        removed=tuple(slot for slot in old if slot not in new),
    )


def _same(one: SourceStream, other: SourceStream) -> bool:
    """Whether both are one publisher, wherever it stands in the list."""
    return replace(one, source_index=0) == replace(other, source_index=0)


def only_list(before: Curve | None, now: Curve | None) -> bool:
    """Whether nothing but the allow-list has changed."""
    return before is not None and now is not None and before != now and replace(before, clients=now.clients) == now


def must_reconnect(before: Curve | None, now: Curve | None) -> bool:
    """Whether connected peers must show their keys again. They need not where the allow-list only grew."""
    if before is None or now is None:
        return before is not now
    return replace(before, clients=now.clients) != now or not before.clients.keys() <= now.clients.keys()


def refuse(running: Config, wanted: Config) -> None:
    """Refuse a configuration that changes what a reload cannot change.

    Raises:
        ConfigError: it names every such key.
    """
    problems = [
        Problem(key, "cannot change without a restart", None if value is None else str(value))
        for key, value in _differences(running.to_dict(), wanted.to_dict())
    ]
    slots = {stream.label: stream.index for stream in running.streams()}
    for stream in wanted.streams():
        before = slots.get(stream.label, stream.index)
        if before != stream.index:
            first = before - stream.rank
            problems.append(
                Problem(
                    f"sources[{stream.source_index}].slot",
                    f"{stream.label} would move from slot {before} to {stream.index}, and its ports with it",
                    example=f"slot: {first}",
                )
            )
    if problems:
        raise ConfigError(problems)


def _differences(running: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in wanted.items():
        before = running[name]
        if name in RELOADABLE or before == value:
            continue
        if isinstance(value, dict):
            found += [(f"{name}.{key}", each) for key, each in value.items() if each != before[key]]
        elif name == "outputs" and len(value) == len(before):
            for i, (one, other) in enumerate(zip(before, value, strict=True)):
                found += [(f"outputs[{i}].{key}", each) for key, each in other.items() if each != one[key]]
        else:
            found.append((name, f"{len(value)} outputs, not {len(before)}" if name == "outputs" else value))
    return found
