"""Configuration: flags over ``KVBUS_*`` variables over a YAML file over defaults, checked as a whole.

`load` accepts a configuration, or refuses it with all of its problems at once: unknown keys, undeclared variables, bad
values and contradictions between keys. It returns a frozen `Config`.
"""

from kvbus.common.errors import ConfigError, Problem
from kvbus.config.discovering import FoundRank
from kvbus.config.dynamo import DynamoPlane
from kvbus.config.endpoints import Address, endpoint_offset, parse_address, parse_endpoint
from kvbus.config.kafka import KafkaServers, KafkaTopic
from kvbus.config.limits import Limits
from kvbus.config.load import load
from kvbus.config.logs import LogAccess, LogKeys
from kvbus.config.models import Config, SourceStream, render_topic, topic_for
from kvbus.config.nats import NatsServers, NatsStream
from kvbus.config.outputs import OutputConfig, StreamEndpoints
from kvbus.config.redis import RedisKeys, RedisServer
from kvbus.config.sources import FoundSource, SourceConfig

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
    "load",
    "parse_address",
    "parse_endpoint",
    "render_topic",
    "topic_for",
]
