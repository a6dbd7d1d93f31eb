"""A discoverer of streams in NATS JetStream that outputs of ``type: nats`` have written. Each stream is a source."""

from __future__ import annotations

from kvbus.config import NatsServers
from kvbus.parts.discovery.contract import Services
from kvbus.parts.discovery.streams import LogStreams, StreamPatterns
from kvbus.parts.log.nats import NatsLog
from kvbus.parts.log.place import NatsPlace, place_at


class NatsStreamsSettings(StreamPatterns, NatsServers):
    """The keys of ``discover: {nats: …}``."""


class NatsStreams(LogStreams):
    """A reader of all streams in a JetStream stream."""

    Settings = NatsStreamsSettings

    def __init__(self, settings: NatsStreamsSettings, services: Services) -> None:
        del services  # a log names its engines itself
        place: NatsPlace = place_at(settings.endpoint, settings)
        super().__init__(lambda: NatsLog(place), settings, f"nats://{place.servers}/{place.keys.stream}")
