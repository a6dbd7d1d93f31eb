"""A discoverer of the streams that outputs of ``type: kafka`` have written to a Kafka topic.

Each stream becomes a source.
"""

from __future__ import annotations

from kvbus.config import KafkaServers
from kvbus.parts.discovery.contract import Services
from kvbus.parts.discovery.streams import LogStreams, StreamPatterns
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.location import KafkaLocation, location_at


class KafkaStreamsSettings(StreamPatterns, KafkaServers):
    """The configuration keys of ``discover: {kafka: …}``."""


class KafkaStreams(LogStreams):
    """A reader of the streams in a Kafka topic. The patterns in its settings select the streams."""

    Settings = KafkaStreamsSettings

    def __init__(self, settings: KafkaStreamsSettings, services: Services) -> None:
        del services  # not needed: the name and the rank of each engine are in the keys of the log's streams
        location: KafkaLocation = location_at(settings.endpoint, settings)
        super().__init__(lambda: KafkaLog(location), settings, f"kafka://{location.servers}/{location.topic}")
