"""A discoverer of streams in Redis or Valkey that outputs of ``type: redis`` have written. Each stream is a source."""

from __future__ import annotations

from kvbus.config import RedisServer
from kvbus.parts.discovery.contract import Services
from kvbus.parts.discovery.streams import LogStreams, StreamPatterns
from kvbus.parts.log.place import RedisPlace, place_at
from kvbus.parts.log.redis import RedisLog


class RedisStreamsSettings(StreamPatterns, RedisServer):
    """The keys of ``discover: {redis: …}``."""


class RedisStreams(LogStreams):
    """A reader of all streams with one prefix."""

    Settings = RedisStreamsSettings

    def __init__(self, settings: RedisStreamsSettings, services: Services) -> None:
        del services  # a log names its engines itself
        place: RedisPlace = place_at(settings.endpoint, settings)
        where = f"redis://{place.servers}/{settings.database}/{settings.prefix}"
        super().__init__(lambda: RedisLog(place), settings, where)
