"""The driver of outputs with ``type: nats``, which write their streams to NATS JetStream.

The extra ``nats`` is required.
"""

from __future__ import annotations

from kvbus.config import OutputConfig
from kvbus.parts.log.location import location_of
from kvbus.parts.log.nats import NatsLog
from kvbus.parts.outputs.contract import Services
from kvbus.parts.outputs.log_output import LogOutput


class NatsOutput(LogOutput):
    """The driver of one output that writes to NATS JetStream.

    Args:
        output: the output's index in the configuration.
        config: the output's configuration.
        services: the daemon's counters, functions and limits for this driver.
    """

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        super().__init__(output, config, services, NatsLog(location_of(config)))
