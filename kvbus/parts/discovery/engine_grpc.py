"""Access to an engine's gRPC API: channels to it, and an encoder and a decoder of protobuf fields.

The gRPC discoverer and the proxy of :mod:`kvbus.parts.front.grpc` use this module. They also import the gRPC library
from here, so that ``GRPC_VERBOSITY`` is set before the library is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from kvbus.parts.discovery.contract import DiscoveryError

# Set this variable before gRPC is imported, because gRPC reads it only then. Without it, gRPC writes lines to stderr
# that do not have the format of kvbus's log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from grpc import aio

__all__ = [
    "JSON_INFO",
    "METADATA_LIMITS",
    "SERVER_INFO",
    "aio",
    "grpc",
    "message_fields",
    "number_field",
    "open_channel",
    "text_field",
]

SERVER_INFO: Final = "/sglang.runtime.v1.SglangService/GetServerInfo"
"""SGLang's gRPC method that returns the same JSON as its HTTP endpoint ``/server_info``."""
JSON_INFO: Final = 1
"""Number of the protobuf field that holds the JSON in the answer to :data:`SERVER_INFO`."""

METADATA: Final = 65_536
"""Maximum size in bytes of the metadata (headers) of a gRPC call, in each direction."""
BACKOFF: Final = 1000
"""Maximum time in milliseconds between two attempts to connect to an engine that is down."""

METADATA_LIMITS: Final = (("grpc.max_metadata_size", METADATA), ("grpc.absolute_max_metadata_size", METADATA))
_CHANNEL: Final = (
    *METADATA_LIMITS,
    ("grpc.enable_retries", 0),  # if gRPC repeated a call, the engine would generate the answer twice
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", BACKOFF),
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf fields. The two wire types of groups are missing, because proto3 has no groups."""


def open_channel(address: str, options: Iterable[tuple[str, int]] = ()) -> Any:
    """Return a channel to an engine's gRPC API.

    The channel does not connect yet. It connects when the first call is made.
    """
    return aio.insecure_channel(address, options=[*_CHANNEL, *options])


class Field(NamedTuple):
    """A decoded field of a protobuf message. ``raw`` is the field's complete encoding, including its number."""

    number: int
    value: int | bytes
    raw: bytes


def message_fields(message: int | bytes) -> Iterator[Field]:
    """Yield the fields of a protobuf message in the order in which they are encoded.

    Raises:
        DiscoveryError: ``message`` is not the encoding of a protobuf message.
    """
    if isinstance(message, int):
        raise DiscoveryError("the engine's answer does not list event sources: it has a number in place of a source")
    at = 0
    while at < len(message):
        begin = at
        key, at = _read(message, at)
        value: int | bytes
        if key & 7 == _VARINT:
            value, at = _read(message, at)
        elif key & 7 in (_BYTES, _FIXED64, _FIXED32):
            size = {_FIXED64: 8, _FIXED32: 4}.get(key & 7)
            if size is None:
                size, at = _read(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise DiscoveryError(f"the engine's answer is not protobuf: wire type {key & 7}")
        if at > len(message):
            raise DiscoveryError("the engine's answer is not protobuf: it ends in the middle of a field")
        yield Field(key >> 3, value, message[begin:at])


def _read(message: bytes, at: int) -> tuple[int, int]:
    """Decode the varint that begins at the position ``at``. Return its value, and the position of the byte after it."""
    value = shift = 0
    while at < len(message) and shift < 70:
        value |= (message[at] & 0x7F) << shift
        at += 1
        if not message[at - 1] & 0x80:
            return value, at
        shift += 7
    raise DiscoveryError("the engine's answer is not protobuf: a number has no end")


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(number: int, value: int) -> bytes:
    """Encode a protobuf field that holds a number."""
    return _number(number << 3 | _VARINT) + _number(value)


def text_field(number: int, value: bytes) -> bytes:
    """Encode a protobuf field that holds text, bytes or a message."""
    return _number(number << 3 | _BYTES) + _number(len(value)) + value
