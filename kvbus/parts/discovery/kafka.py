"""A discoverer of streams in a Kafka topic that outputs of ``type: kafka`` have written. Each stream is a source."""

from __future__ import annotations

from kvbus.config import KafkaServers
from kvbus.parts.discovery.contract import Services
from kvbus.parts.discovery.streams import LogStreams, StreamPatterns
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.place import Place, place_at


class KafkaStreamsSettings(StreamPatterns, KafkaServers):
    """The keys of ``discover: {kafka: …}``."""


class KafkaStreams(LogStreams):
    """A reader of all streams in a topic."""

    Settings = KafkaStreamsSettings

    def __init__(self, settings: KafkaStreamsSettings, services: Services) -> None:
        del services  # a log names its engines itself
        place: Place = place_at(settings.endpoint, settings)
        super().__init__(lambda: KafkaLog(place), settings, f"kafka://{place.servers}/{place.topic}")
