"""The driver of ``type: redis``: streams in Redis or Valkey. It needs the extra ``redis``."""

from __future__ import annotations

from kvbus.config import OutputConfig
from kvbus.parts.log.place import place_of
from kvbus.parts.log.redis import RedisLog
from kvbus.parts.outputs.contract import Services
from kvbus.parts.outputs.log_output import LogOutput


class RedisOutput(LogOutput):
    """The driver of one output in Redis or Valkey.

    Args:
        output: index of the output in the configuration.
        config: the output's configuration.
        services: the daemon's services.
    """

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        super().__init__(output, config, services, RedisLog(place_of(config)))
