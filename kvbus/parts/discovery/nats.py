"""A discoverer of the streams that outputs of ``type: nats`` have written to NATS JetStream.

Each stream becomes a source.
"""

from __future__ import annotations

from kvbus.config import NatsServers
from kvbus.parts.discovery.contract import Services
from kvbus.parts.discovery.streams import LogStreams, StreamPatterns
from kvbus.parts.log.location import NatsLocation, location_at
from kvbus.parts.log.nats import NatsLog


class NatsStreamsSettings(StreamPatterns, NatsServers):
    """The configuration keys of ``discover: {nats: …}``."""


class NatsStreams(LogStreams):
    """A reader of kvbus's streams in one JetStream stream. The patterns in its settings select kvbus's streams."""

    Settings = NatsStreamsSettings

    def __init__(self, settings: NatsStreamsSettings, services: Services) -> None:
        del services  # not needed: the name and the rank of each engine are in the keys of the log's streams
        location: NatsLocation = location_at(settings.endpoint, settings)
        super().__init__(lambda: NatsLog(location), settings, f"nats://{location.servers}/{location.keys.stream}")
