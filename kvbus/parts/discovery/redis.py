"""A discoverer of the streams that outputs of ``type: redis`` have written to Redis or Valkey.

Each stream becomes a source.
"""

from __future__ import annotations

from kvbus.config import RedisServer
from kvbus.parts.discovery.contract import Services
from kvbus.parts.discovery.streams import LogStreams, StreamPatterns
from kvbus.parts.log.location import RedisLocation, location_at
from kvbus.parts.log.redis import RedisLog


class RedisStreamsSettings(StreamPatterns, RedisServer):
    """The configuration keys of ``discover: {redis: …}``."""


class RedisStreams(LogStreams):
    """A reader of the streams with one key prefix in Redis. The patterns in its settings select the streams."""

    Settings = RedisStreamsSettings

    def __init__(self, settings: RedisStreamsSettings, services: Services) -> None:
        del services  # not needed: the name and the rank of each engine are in the keys of the log's streams
        location: RedisLocation = location_at(settings.endpoint, settings)
        where = f"redis://{location.servers}/{settings.database}/{settings.prefix}"
        super().__init__(lambda: RedisLog(location), settings, where)
