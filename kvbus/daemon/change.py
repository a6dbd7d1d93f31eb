"""The way from the sources of a running daemon to those that discovery found: decisions alone, nothing is done here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvbus.config import Config, SourceStream
from kvbus.daemon.placement import Placement, place
from kvbus.transport.curve import Curve


@dataclass(frozen=True, slots=True)
class Change:
    """The way from one set of sources to another.

    Attributes:
        config: the configuration with the new sources.
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
    """Compare the sources of two configurations, which differ in nothing else.

    Args:
        running: the configuration in force.
        wanted: the configuration with the new sources.
        is_open: says whether the source in a slot has a connection.
        placement: the slots in force; None: as the configuration in force has them by itself.
    """
    before = placement or place(Placement(), running)
    after = place(before, wanted)
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
