"""The driver of ``type: kafka``."""

from __future__ import annotations

from kvbus.config import KafkaTopic, OutputConfig
from kvbus.log.kafka import KafkaLog, Place
from kvbus.outputs.contract import Services
from kvbus.outputs.log_output import LogOutput


class KafkaOutput(LogOutput):
    """One output's streams in Kafka.

    Args:
        output: index of the output in the configuration.
        config: the output's configuration.
        services: the daemon's services.
    """

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        topic = config.kafka or KafkaTopic()
        servers = ",".join(each.removeprefix("tcp://") for each in (config.endpoint, *topic.more_servers))
        place = KafkaLog(Place(servers, topic.topic))
        super().__init__(output, config, services, place, topic.cluster, topic.state_every)
