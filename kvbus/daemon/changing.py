"""Change a running daemon: its sources if discovery finds other engines, and its keys if key files change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvbus.common.errors import BindError
from kvbus.config import Config, SourceStream
from kvbus.core.commands import Command
from kvbus.core.events import OutputPlaced, SourceDown, SourcePlaced, SourceRemoved
from kvbus.daemon.build import (
    add_reservation,
    add_reservations,
    new_stream,
    next_seqs,
    output_spec,
    source_spec,
)
from kvbus.daemon.host import SourceHost
from kvbus.daemon.keys import Keys, output_domain, source_domain
from kvbus.daemon.outputs import peer_policy_of
from kvbus.daemon.placement import Placement, assign_slots, forget, keep_placement, worker_of
from kvbus.daemon.resume import identity
from kvbus.daemon.views import topic_of
from kvbus.parts.outputs.contract import OutputDriver, ViewDriver
from kvbus.state.contract import MARGIN
from kvbus.transport.curve import Curve

log = logging.getLogger("kvbus.daemon")

BIND_AGAIN: Final = 0.01
"""Seconds until the daemon tries again to bind an address that it has just released."""

BIND_ATTEMPTS: Final = 200


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between the daemon's current sources and its next sources.

    Attributes:
        config: the configuration with the next sources.
        added: the streams of new sources in free slots.
        changed: the streams of new sources in slots that other sources have now, and of sources whose socket could not
            be opened earlier.
        removed: the slots that become free.
        moved: the streams of engines that discovery has found at a new address. Each is the same worker as before, and
            may be in the same epoch.
        placement: the slots of all workers after the change.
    """

    config: Config
    placement: Placement
    added: tuple[SourceStream, ...]
    changed: tuple[SourceStream, ...]
    removed: tuple[int, ...]
    moved: tuple[SourceStream, ...] = ()

    @property
    def replaced(self) -> tuple[SourceStream, ...]:
        """The streams of the changed and added sources. These sources begin with an empty index and a new epoch."""
        return *self.changed, *self.added


def change_to(
    running: Config, wanted: Config, is_open: Callable[[int], bool], placement: Placement | None = None
) -> Change:
    """Return the difference between the sources of two configurations that are otherwise equal.

    Args:
        running: the current configuration.
        wanted: the configuration with the next sources.
        is_open: returns whether the source in a slot has an open socket.
        placement: the current slots of the workers; None if they follow the order of the sources in ``running``.
    """
    before = placement or assign_slots(Placement(), running)
    after = assign_slots(before, wanted)
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
    """Return whether two streams come from the same publisher.

    The publisher's position in the list of sources does not matter, nor does the discoverer that has found it.
    """
    return replace(one, source_index=0, found="") == replace(other, source_index=0, found="")


def _moved(one: SourceStream, other: SourceStream) -> bool:
    """Return whether two streams are of one engine that discovery has found at two addresses.

    They are not if only one of them has a replay endpoint.
    """
    if not (one.found and other.found) or (one.replay_endpoint is None) != (other.replay_endpoint is None):
        return False
    return _same(replace(one, endpoint=other.endpoint, replay_endpoint=other.replay_endpoint), other)


def only_list(before: Curve | None, now: Curve | None) -> bool:
    """Return whether a change of a section's CURVE keys has changed only the list of clients that may connect."""
    return before is not None and now is not None and before != now and replace(before, clients=now.clients) == now


def must_reconnect(before: Curve | None, now: Curve | None) -> bool:
    """Return whether connected peers must connect again after a change of keys, so that kvbus checks their keys again.

    Peers stay connected if the change has only added keys to the list of clients: their own keys are as valid as
    before.
    """
    if before is None or now is None:
        return before is not now
    grants = {key: client.grant for key, client in now.clients.items()}
    unchanged = all(grants.get(key) == client.grant for key, client in before.clients.items())
    return replace(before, clients=now.clients) != now or not unchanged


class Changes:
    """The methods that change the sources and keys of a running daemon.

    Args:
        daemon: the daemon to change.
    """

    def __init__(self, daemon: SourceHost) -> None:
        self._daemon = daemon

    async def apply(self, change: Change, keys: Keys) -> None:
        """Replace the daemon's sources by the sources of ``change``.

        Args:
            change: the difference between the current and the next sources.
            keys: the CURVE keys for the next sources and for the outputs.

        Raises:
            BindError: an endpoint of a stream for a new source cannot be bound. The caller may try again. Nothing has
                changed, except that the streams of removed workers are closed if new workers need their slots.
            ConfigError: the keys need more views than ``limits.max_views``. Nothing has changed.
        """
        daemon = self._daemon
        daemon.views.wanted(change.config, keys)
        placement = self._make_room(change)
        self._open_streams(change, placement)
        daemon.config = change.config
        daemon.placement = placement
        daemon.streams = placement.streams(change.config)
        daemon.keep_slots()
        for slot in change.removed:
            self._remove(slot)
        for stream in change.replaced:
            self._replace(stream)
        if change.replaced or change.removed:
            for number in range(len(daemon.outputs.drivers)):
                # A view may be limited to sources with certain names. So the streams that each router may read have
                # changed, and the driver needs the new rules.
                if daemon.views.of_output(number):
                    daemon.outputs.drivers[number].allow(daemon.output_policy(number))
            daemon.serve_views()
        await self.apply_keys(keys, without=frozenset(stream.index for stream in change.replaced))
        for stream in change.replaced:
            await self._open_source(stream)
        for stream in change.moved:
            await self.reconnect(stream)
        daemon.place_sources()
        if change.replaced or change.removed:
            if daemon.state is not None:
                daemon.catch_up()
                daemon.state.rename(self._identity)
            counts = len(change.added), len(change.changed), len(change.removed)
            log.info("sources: %d added, %d changed, %d removed", *counts)

    async def apply_keys(self, keys: Keys, without: frozenset[int] = frozenset()) -> None:
        """Replace the CURVE keys of all sources and outputs.

        Peers whose keys were removed or have other rights must connect again. All other peers stay connected.

        Args:
            keys: the new keys of all sources and outputs.
            without: slots of sources that the caller opens again itself.

        Raises:
            ConfigError: the keys need more views than ``limits.max_views``. Nothing has changed.
        """
        daemon = self._daemon
        changed, known = self._change_views(keys), self._identity
        before, daemon.keys = daemon.keys, keys
        for number, output in enumerate(daemon.config.outputs):
            domain = output_domain(output.name)
            was, now = before.get(domain), keys.get(domain)
            if only_list(was, now) and daemon.outputs.drivers[number].allow(daemon.output_policy(number)):
                log.info(
                    "output %s: the list of routers that may connect has changed",
                    output.name,
                    extra={"output": output.name},
                )
            elif must_reconnect(was, now):
                text = "output %s: its keys were changed or removed, so every router must connect again"
                log.info(text, output.name, extra={"output": output.name})
                daemon.outputs.drivers[number].reopen(daemon.output_policy(number))
        self._place_views(changed)
        if daemon.state is not None and self._identity != known:
            daemon.catch_up()
            daemon.state.rename(self._identity)
        for slot, stream in daemon.streams.items():
            domain = source_domain(daemon.config.sources[stream.source_index].name)
            was, now = before.get(domain), keys.get(domain)
            if slot in without:
                continue
            if only_list(was, now):
                daemon.source_sockets.allow(slot, daemon.source_policy(stream))
            elif must_reconnect(was, now):
                log.info(
                    "source %s: its keys were changed or removed: connecting again",
                    stream.label,
                    extra=stream.log_fields,
                )
                await self.reconnect(stream)

    async def reconnect(self, stream: SourceStream) -> None:
        """Close the connection to a source's engine and connect again.

        The next replay of the engine shows whether it is still in the same epoch.
        """
        daemon = self._daemon
        daemon.feed(SourceDown(stream.index))
        daemon.source_sockets.close(stream.index)
        await self._open_source(stream)

    @property
    def _identity(self) -> list[str]:
        daemon = self._daemon
        return identity(
            daemon.config,
            daemon.streams,
            len(daemon.relay.sources),
            daemon.views.identity(daemon.config, daemon.keys),
        )

    def _change_views(self, keys: Keys) -> list[int]:
        """Create and close views so that there is one view for each set of rights of the new keys.

        Returns:
            The numbers of the views that were created, closed or replaced.

        Raises:
            ConfigError: the keys need more views than ``limits.max_views``. Nothing has changed.
        """
        daemon = self._daemon
        changed = daemon.views.change(daemon.config, keys)
        before = next_seqs(daemon.relay)
        unseen = (max(before.values(), default=0) // MARGIN + 1) * MARGIN
        for number in changed:
            view = daemon.views.all[number]
            daemon.reservations.drop(number, before)
            if not view.closed:
                add_reservations(daemon.reservations, daemon.config, view, number, daemon.placement)
                daemon.reservations.skip(unseen, output=number)
        return changed

    def _place_views(self, changed: list[int]) -> None:
        """Make the relay create the streams of the changed views, and serve these views to routers.

        Routers that read the previous views with these numbers are already disconnected.
        """
        daemon = self._daemon
        commands: list[Command] = []
        for number in changed:
            view, driver = daemon.views.all[number], daemon.driver_of(number)
            if isinstance(driver, ViewDriver):
                for _, slot in [each for each in driver.views if each[0] == number]:
                    driver.close_view(number, slot)
            spec = output_spec(daemon.config, view, number, daemon.streams, daemon.reservations, runtime=daemon.runtime)
            commands += daemon.relay.handle(OutputPlaced(number, spec), daemon.clock.time())
        daemon.widen()
        daemon.serve_views()
        daemon.carry_out(commands)

    def _make_room(self, change: Change) -> Placement:
        """Close the streams of removed workers whose slots new workers get, on outputs with ``layout: per_topic``.

        Connected routers get AllBlocksCleared on such a stream before it closes. A router that connects later does not
        get these streams.

        Returns:
            The placement of ``change`` with the seqs that the removed workers have reached. A worker that returns
            begins after them.
        """
        daemon = self._daemon
        if all(output.layout == "per_source" for output in daemon.config.outputs):
            return change.placement
        lost = {slot: worker for worker, slot in daemon.placement.slots.items() if worker not in change.placement.slots}
        numbers = [number for number, output in enumerate(daemon.config.outputs) if output.layout == "per_topic"]
        for slot, worker in lost.items():
            log.warning("source %s, rank %d: removed, because another source needs its slot %d", *worker, slot)
            if not daemon.relay.sources[slot].gone:
                daemon.source_sockets.close(slot)
                daemon.feed(SourceRemoved(slot))
            for number in numbers:
                daemon.outputs.drivers[number].retire(slot)
        reached = [daemon.reservations.first(number, slot) for number in numbers for slot in lost]
        placement = forget(change.placement, reached)
        # The placement contains the seqs that the removed workers have reached. Store it before their reservations are
        # removed. Otherwise these seqs would be lost if kvbus were killed in between.
        keep_placement(daemon.reservations, daemon.config, placement)
        for number in numbers:
            for slot in lost:
                daemon.reservations.forget(number, slot)
        daemon.process.slots_reused += len(lost)
        return placement

    def _open_streams(self, change: Change, placement: Placement) -> None:
        """Open the outgoing streams of added sources on all outputs.

        If a stream cannot be opened, close the streams that this call has opened before it.
        """
        daemon = self._daemon
        config = change.config
        opened: list[tuple[OutputDriver, int]] = []
        try:
            for number, view in enumerate(daemon.views.all):
                layout = config.outputs[view.output].layout
                if view.closed or layout == "merged":
                    continue
                if number >= len(daemon.outputs.drivers):
                    add_reservations(daemon.reservations, config, view, number, placement)
                    continue
                driver = daemon.outputs.drivers[number]
                by_topic = layout == "per_topic"
                for stream in change.replaced if by_topic else change.added:
                    if by_topic and stream.index in driver.streams:
                        continue  # an earlier source of the same worker has opened the stream of this topic
                    worker = worker_of(config, stream)
                    add_reservation(daemon.reservations, config, view, number, placement, worker)
                    topic = topic_of(config, config.outputs[view.output], worker) or b""
                    driver.open(stream.index, topic, peer_policy_of(config, number, daemon.keys, daemon.views))
                    opened.append((driver, stream.index))
        except BaseException:
            for driver, slot in opened:
                driver.close(slot)
            raise

    def _remove(self, slot: int) -> None:
        daemon = self._daemon
        daemon.source_sockets.close(slot)
        daemon.feed(SourceRemoved(slot))
        for number, output in enumerate(daemon.config.outputs):
            if output.layout == "per_source":
                daemon.outputs.drivers[number].close(slot, daemon.config.shutdown_timeout)

    def _replace(self, stream: SourceStream) -> None:
        """Put the source of ``stream`` into its slot, in place of the current source of that slot."""
        daemon = self._daemon
        slot = stream.index
        daemon.source_sockets.close(slot)
        streams = [
            new_stream(
                daemon.config,
                view,
                worker_of(daemon.config, stream),
                0 if daemon.config.outputs[view.output].layout == "merged" else daemon.reservations.first(number, slot),
                daemon.runtime,
            )
            for number, view in enumerate(daemon.views.all)
        ]
        daemon.feed(SourcePlaced(slot, source_spec(daemon.config, stream), streams))

    async def _open_source(self, stream: SourceStream) -> None:
        """Open a source's socket. Try several times, because a socket that was just closed may still hold the address.

        If all attempts fail because another process holds the address, the source has no connection. kvbus tries again
        only when discovery reports a change.
        """
        daemon = self._daemon
        for _ in range(BIND_ATTEMPTS):
            try:
                daemon.source_sockets.open(stream, daemon.source_policy(stream))
            except BindError as error:
                reason = error
            else:
                return
            await asyncio.sleep(BIND_AGAIN)
        text = "source %s is not connected: %s; kvbus tries again when discovery reports a change"
        log.error(text, stream.label, reason, extra=stream.log_fields)


class ChangingHost(SourceHost, Protocol):
    """A running daemon, together with the object that changes its sources."""

    @property
    def changes(self) -> Changes:
        """The object that changes the daemon's sources."""
