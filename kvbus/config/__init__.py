"""The configuration. Command-line flags override ``KVBUS_*`` variables, and these override a YAML file.

`load` returns an immutable `Config`, or raises one error that lists all problems: unknown keys, unknown variables,
invalid values and contradictions between keys.
"""

from kvbus.common.errors import ConfigError, Problem
from kvbus.config.dynamo import DynamoPlane
from kvbus.config.endpoints import Address, endpoint_offset, parse_address, parse_endpoint
from kvbus.config.limits import Limits
from kvbus.config.load import load
from kvbus.config.logs import (
    KafkaServers,
    KafkaTopic,
    LogAccess,
    LogKeys,
    NatsServers,
    NatsStream,
    RedisKeys,
    RedisServer,
)
from kvbus.config.models import Config, SourceStream, further_ranks, render_topic, topic_for
from kvbus.config.outputs import OutputConfig, StreamEndpoints
from kvbus.config.sources import FoundRank, FoundSource, SourceConfig

__all__ = [
    "Address",
    "Config",
    "ConfigError",
    "DynamoPlane",
    "FoundRank",
    "FoundSource",
    "KafkaServers",
    "KafkaTopic",
    "Limits",
    "LogAccess",
    "LogKeys",
    "NatsServers",
    "NatsStream",
    "OutputConfig",
    "Problem",
    "RedisKeys",
    "RedisServer",
    "SourceConfig",
    "SourceStream",
    "StreamEndpoints",
    "endpoint_offset",
    "further_ranks",
    "load",
    "parse_address",
    "parse_endpoint",
    "render_topic",
    "topic_for",
]
