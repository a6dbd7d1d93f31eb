"""The driver of ``type: nats``: streams in NATS JetStream. It needs the extra ``nats``."""

from __future__ import annotations

from kvbus.config import OutputConfig
from kvbus.parts.log.nats import NatsLog
from kvbus.parts.log.place import place_of
from kvbus.parts.outputs.contract import Services
from kvbus.parts.outputs.log_output import LogOutput


class NatsOutput(LogOutput):
    """The driver of one output in NATS JetStream.

    Args:
        output: index of the output in the configuration.
        config: the output's configuration.
        services: the daemon's services.
    """

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        super().__init__(output, config, services, NatsLog(place_of(config)))
