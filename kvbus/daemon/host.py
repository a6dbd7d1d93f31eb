"""The parts of the daemon that the modules use which change its sources. No such module imports the daemon's module."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvbus.config import Config, SourceStream
from kvbus.core.commands import Command
from kvbus.core.events import RelayEvent
from kvbus.core.relay import Relay
from kvbus.core.stats import ProcessStats
from kvbus.daemon.keys import Keys
from kvbus.daemon.outputs import Outputs
from kvbus.daemon.placement import Placement
from kvbus.daemon.runtime import RunningClock, Runtime
from kvbus.daemon.source_sockets import SourceSockets
from kvbus.daemon.views import AccessScopes
from kvbus.parts.outputs.contract import OutputDriver
from kvbus.state.reservations import SeqReservations
from kvbus.state.writer import StateWriter
from kvbus.transport.sockets import PeerPolicy


class SourceHost(Protocol):
    """A running daemon, whose sources and keys can be changed.

    Attributes:
        configured: the configuration without the engines that discovery has found.
        config: the configuration with these engines.
        changing: a lock that is held while sources or keys change.
    """

    configured: Config
    config: Config
    changing: asyncio.Lock
    placement: Placement
    streams: dict[int, SourceStream]
    keys: Keys
    views: AccessScopes
    relay: Relay
    outputs: Outputs
    source_sockets: SourceSockets
    reservations: SeqReservations
    state: StateWriter | None
    process: ProcessStats
    runtime: Runtime
    clock: RunningClock

    def feed(self, event: RelayEvent) -> None:
        """Pass an event to the relay, and carry out the commands that it returns."""

    def carry_out(self, commands: list[Command]) -> None:
        """Carry out commands of the relay."""

    def place_sources(self) -> None:
        """Send the relay the configuration section and the endpoints of each source."""

    def keep_slots(self) -> None:
        """Write the slots of all workers to disk."""

    def widen(self) -> None:
        """Record, in the seq reservation of each merged output and view, how many slots exist."""

    def serve_views(self) -> None:
        """Open the streams of the views that routers may read, and close the streams of all other views."""

    def catch_up(self) -> None:
        """Do all work that the relay has postponed so that the event loop stays responsive."""

    def driver_of(self, number: int) -> OutputDriver:
        """Return the driver that serves the view with this number."""

    def output_policy(self, number: int) -> PeerPolicy:
        """Return the keys of the routers that may connect to an output, and the rights of each key."""

    def source_policy(self, stream: SourceStream) -> PeerPolicy:
        """Return the CURVE keys and size limits for the connection to a source's engine."""
