"""What a new configuration changes in a running daemon, and whether it may: decisions alone, nothing is done here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config, SourceStream
from kvbus.daemon.placement import Placement, place, worker_of
from kvbus.transport.curve import Curve

RELOADABLE: Final = frozenset(
    {
        "sources",
        "log_level",
        "shutdown_timeout",
        "reload",
        "key_reload_interval",
        "discovery_grace",
        "limits.max_sources",
        "limits.max_views",
        "outputs.heartbeat",
        "outputs.journal_batches",
        "outputs.journal_bytes",
    }
)
"""Keys that a reload may change; everything else takes a restart."""


@dataclass(frozen=True, slots=True)
class Change:
    """The way from one configuration to another.

    Attributes:
        config: the new configuration.
        added: streams of sources in slots that were free.
        changed: streams of sources that take the place of others, or that have no connection yet.
        removed: slots that become free.
        moved: streams of found engines that are at another address now: the same workers, which may be in the same
            epoch.
        placement: the workers' slots from now on.
    """

    config: Config
    placement: Placement
    added: tuple[SourceStream, ...]
    changed: tuple[SourceStream, ...]
    removed: tuple[int, ...]
    moved: tuple[SourceStream, ...] = ()

    @property
    def replaced(self) -> tuple[SourceStream, ...]:
        """The streams whose sources begin anew."""
        return *self.changed, *self.added


def change_to(
    running: Config, wanted: Config, is_open: Callable[[int], bool], placement: Placement | None = None
) -> Change:
    """Compare two configurations.

    Args:
        running: the configuration in force.
        wanted: the new configuration.
        is_open: says whether the source in a slot has a connection.
        placement: the slots in force; None: as the configuration in force has them by itself.

    Raises:
        ConfigError: the new configuration changes what a reload cannot change. It names every such key.
    """
    before = placement or place(Placement(), running)
    after = place(before, wanted)
    refuse(running, wanted, before, after)
    old, new = before.streams(running), after.streams(wanted)
    others = [
        stream for slot, stream in new.items() if slot in old and not (_same(old[slot], stream) and is_open(slot))
    ]
    moved = tuple(stream for stream in others if _moved(old[stream.index], stream))
    return Change(
        wanted,
        after,
        added=tuple(new[slot] for slot in new if slot not in old),
        changed=tuple(stream for stream in others if stream not in moved),
        removed=tuple(slot for slot in old if slot not in new),
        moved=moved,
    )


def _same(one: SourceStream, other: SourceStream) -> bool:
    """Whether both are one publisher, wherever it stands in the list and whoever has found it."""
    return replace(one, source_index=0, found="") == replace(other, source_index=0, found="")


def _moved(one: SourceStream, other: SourceStream) -> bool:
    """Whether both are one engine that was found, at two addresses, and can be asked the same at both."""
    if not (one.found and other.found) or (one.replay_endpoint is None) != (other.replay_endpoint is None):
        return False
    return _same(replace(one, endpoint=other.endpoint, replay_endpoint=other.replay_endpoint), other)


def only_list(before: Curve | None, now: Curve | None) -> bool:
    """Whether nothing but the allow-list has changed."""
    return before is not None and now is not None and before != now and replace(before, clients=now.clients) == now


def must_reconnect(before: Curve | None, now: Curve | None) -> bool:
    """Whether connected peers must show their keys again. They need not where the allow-list only grew."""
    if before is None or now is None:
        return before is not now
    grants = {key: client.grant for key, client in now.clients.items()}
    stay = all(grants.get(key) == client.grant for key, client in before.clients.items())
    return replace(before, clients=now.clients) != now or not stay


def refuse(running: Config, wanted: Config, before: Placement, after: Placement) -> None:
    """Refuse a configuration that changes what a reload cannot change.

    Raises:
        ConfigError: it names every such key.
    """
    problems = [
        Problem(key, "cannot change without a restart", None if value is None else str(value))
        for key, value in _differences(running.to_dict(), wanted.to_dict())
    ]
    there = {worker: slot for worker, slot in before.slots.items() if worker not in before.gone}
    for slot, stream in after.streams(wanted).items():
        was = there.get(worker_of(wanted, stream), slot)
        if was != slot:
            problems.append(
                Problem(
                    f"sources[{stream.source_index}].slot",
                    f"{stream.label} would move from slot {was} to {slot}, and its ports with it",
                    example=f"slot: {was - stream.rank}",
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
        if isinstance(value, dict) and isinstance(before, dict):
            found += [(f"{name}.{key}", each) for key, each in _other(name, value, before)]
        elif name == "outputs" and len(value) == len(before):
            for i, (one, other) in enumerate(zip(before, value, strict=True)):
                found += [(f"outputs[{i}].{key}", each) for key, each in _other(name, other, one)]
        else:
            found.append((name, f"{len(value)} outputs, not {len(before)}" if name == "outputs" else value))
    return found


def _other(name: str, now: dict[str, Any], before: dict[str, Any]) -> list[tuple[str, Any]]:
    """Keys of a section that are other ones now, without those that a reload may change."""
    return [(key, each) for key, each in now.items() if each != before[key] and f"{name}.{key}" not in RELOADABLE]
