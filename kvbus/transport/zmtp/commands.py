"""Commands of ZMTP 3: a name, then what the command is about.

Source: https://rfc.zeromq.org/spec/37/ ("Commands", "Connection heartbeating").
"""

from __future__ import annotations

from typing import Final

from kvbus.transport.zmtp.frames import encode_command, encode_message
from kvbus.transport.zmtp.reasons import ProtocolError, Reason

READY: Final = b"READY"
ERROR: Final = b"ERROR"
PING: Final = b"PING"
PONG: Final = b"PONG"
SUBSCRIBE: Final = b"SUBSCRIBE"
CANCEL: Final = b"CANCEL"

MAX_IDENTITY: Final = 255
_TTL_BYTES: Final = 2
_MAX_CONTEXT: Final = 16
_MAX_ERROR: Final = 255


def command(name: bytes, data: bytes = b"") -> bytes:
    """Encode a command."""
    return encode_command(bytes([len(name)]) + name + data)


def subscribe(topic: bytes, version: tuple[int, int]) -> bytes:
    """Encode a subscription. It is a command since ZMTP 3.1, a message before."""
    if version >= (3, 1):
        return command(SUBSCRIBE, topic)
    return encode_message([b"\x01" + topic])


def parse_command(body: bytes) -> tuple[bytes, bytes]:
    """Split a command's body into its name and its data.

    Raises:
        ProtocolError: it has no name.
    """
    if not body or not body[0] or len(body) <= body[0]:
        raise ProtocolError(Reason.COMMAND, "a command without a name")
    end = 1 + body[0]
    return body[1:end], body[end:]


def encode_metadata(properties: dict[bytes, bytes]) -> bytes:
    """Encode the properties of a READY."""
    return b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value for name, value in properties.items()
    )


def parse_metadata(data: bytes) -> dict[bytes, bytes]:
    """Parse the properties of a READY. Names are returned in lower case, because case does not matter.

    Raises:
        ProtocolError: they are malformed.
    """
    properties: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_at = name_end + 4
        value_end = value_at + int.from_bytes(data[name_end:value_at], "big")
        if not data[at] or value_end > len(data) or value_at > len(data):
            raise ProtocolError(Reason.COMMAND, "malformed properties")
        properties[data[at + 1 : name_end].lower()] = data[value_at:value_end]
        at = value_end
    return properties


def error(text: str) -> bytes:
    """Encode an ERROR."""
    reason = text.encode("ascii", "replace")[:_MAX_ERROR]
    return command(ERROR, bytes([len(reason)]) + reason)


def refusal(data: bytes) -> ProtocolError:
    """What the peer's ERROR means for this connection."""
    return ProtocolError(Reason.REFUSED, f"the peer says: {data[1:].decode('ascii', 'replace')}")


def pong(ping: bytes) -> bytes:
    """Encode the answer to a PING with this data: its context comes back.

    Raises:
        ProtocolError: the PING is malformed.
    """
    if len(ping) < _TTL_BYTES:
        raise ProtocolError(Reason.COMMAND, "a PING without a time to live")
    return command(PONG, ping[_TTL_BYTES : _TTL_BYTES + _MAX_CONTEXT])
