"""The driver of outputs with ``type: kafka``, which write their streams to a Kafka topic.

The extra ``kafka`` is required.
"""

from __future__ import annotations

from kvbus.config import OutputConfig
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.location import location_of
from kvbus.parts.outputs.contract import Services
from kvbus.parts.outputs.log_output import LogOutput


class KafkaOutput(LogOutput):
    """The driver of one output that writes to Kafka.

    Args:
        output: the output's index in the configuration.
        config: the output's configuration.
        services: the daemon's counters, functions and limits for this driver.
    """

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        super().__init__(output, config, services, KafkaLog(location_of(config)))
