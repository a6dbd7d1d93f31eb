"""The driver of ``type: kafka``: streams in a topic of Kafka. It needs the extra ``kafka``."""

from __future__ import annotations

from kvbus.config import OutputConfig
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.place import place_of
from kvbus.parts.outputs.contract import Services
from kvbus.parts.outputs.log_output import LogOutput


class KafkaOutput(LogOutput):
    """The driver of one output in Kafka.

    Args:
        output: index of the output in the configuration.
        config: the output's configuration.
        services: the daemon's services.
    """

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        super().__init__(output, config, services, KafkaLog(place_of(config)))
