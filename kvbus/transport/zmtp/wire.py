"""Encode and decode the bytes of ZMTP 3: the greeting, frames and commands.

Source: https://rfc.zeromq.org/spec/37/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvbus.transport.zmtp.reasons import ProtocolError, Reason

# -- greeting ---------------------------------------------------------------------------------------------------------

SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
GREETING_BYTES: Final = 64
MAJOR: Final = 3
MINOR: Final = 1

OPENING: Final = SIGNATURE + bytes([MAJOR])
"""The first bytes of kvbus's greeting, which kvbus sends before it has received anything.

The remaining bytes name the security mechanism. kvbus sends them only after the peer's first bytes have arrived,
because libzmq closes the connection as soon as it reads another mechanism than its own, even before it has sent its
greeting. With this order each side learns the other side's mechanism and can report the reason.
"""

_MECHANISM_BYTES: Final = 20


class Greeting(NamedTuple):
    """The contents of a peer's greeting.

    Attributes:
        version: the highest ZMTP version that both sides support, major and minor.
        mechanism: name of the peer's security mechanism.
    """

    version: tuple[int, int]
    mechanism: bytes


def rest_of_greeting(mechanism: bytes) -> bytes:
    """Encode the part of kvbus's greeting that follows :data:`OPENING`."""
    return (bytes([MINOR]) + mechanism.ljust(_MECHANISM_BYTES, b"\0")).ljust(GREETING_BYTES - len(OPENING), b"\0")


def take_greeting(buffer: bytearray) -> Greeting | None:
    """Remove the peer's greeting from the buffer and return it; None until the greeting is complete.

    Raises:
        ProtocolError: the bytes are not a greeting of ZMTP 3.
    """
    if buffer and buffer[0] != SIGNATURE[0]:
        raise ProtocolError(Reason.GREETING, f"the first byte is {buffer[0]:#04x}: ZMTP 1.0, or another protocol")
    if len(buffer) > 9 and buffer[9] != SIGNATURE[9]:
        raise ProtocolError(Reason.GREETING, "the signature is not that of ZMTP 2.0 or later")
    if len(buffer) > 10 and buffer[10] < MAJOR:
        raise ProtocolError(Reason.VERSION, f"ZMTP version byte {buffer[10]}; ZMTP 3.0 is needed")
    if len(buffer) < GREETING_BYTES:
        return None
    # a peer with a later major version also supports this one
    minor = min(buffer[11], MINOR) if buffer[10] == MAJOR else MINOR
    mechanism = bytes(buffer[12 : 12 + _MECHANISM_BYTES]).rstrip(b"\0")
    del buffer[:GREETING_BYTES]
    return Greeting((MAJOR, minor), mechanism)


# -- frames -----------------------------------------------------------------------------------------------------------

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

_SHORT_HEAD: Final = 2
_LONG_HEAD: Final = 9
_LONGEST_SHORT: Final = 255
_FEW: Final = 4096


class Frame(NamedTuple):
    """One ZMTP frame: a part of a message, or a command."""

    command: bool
    more: bool
    body: bytes


def head(size: int, flags: int = 0) -> bytes:
    """Encode the head of a frame.

    Args:
        size: number of bytes of the frame's body.
        flags: 0, MORE or COMMAND.
    """
    return bytes((flags, size)) if size <= _LONGEST_SHORT else bytes((LONG | flags,)) + size.to_bytes(8, "big")


def encode_message(frames: Sequence[bytes], *, unfinished: bool = False) -> bytes:
    """Encode a message. The same bytes can be sent to many peers.

    Args:
        frames: the frames of the message.
        unfinished: True if ``frames`` are only the first frames of the message.
    """
    return b"".join(encoded_parts(frames, unfinished=unfinished))


def encoded_parts(frames: Sequence[bytes], *, unfinished: bool = False) -> tuple[bytes, bytes]:
    """Encode a message without a copy of its last frame. Return all bytes before this frame, and the frame.

    A large last frame can so be in memory once for all peers that wait for it.
    """
    parts: list[bytes] = []
    for frame in frames[:-1]:
        parts += (head(len(frame), MORE), frame)
    parts.append(head(len(frames[-1]), MORE if unfinished else 0))
    return b"".join(parts), frames[-1]


def take_frame(buffer: bytearray, limit: int, too_large: Reason = Reason.FRAME_BYTES) -> Frame | None:
    """Remove the next frame from the buffer and return it; None until the frame is complete.

    Args:
        buffer: the received bytes.
        limit: maximum bytes of a frame's body. A larger frame raises an error as soon as its size is known.
        too_large: the reason that the error has if the frame is too large.

    Raises:
        ProtocolError: the frame has unknown flags, or is larger than the limit.
    """
    if not buffer:
        return None
    flags = buffer[0]
    if flags > COMMAND | LONG or flags & (COMMAND | MORE) == COMMAND | MORE:
        raise ProtocolError(Reason.FRAME, f"a frame with the flags {flags:#04x}, which ZMTP does not allow")
    start = _LONG_HEAD if flags & LONG else _SHORT_HEAD
    if len(buffer) < start:
        return None
    size = int.from_bytes(buffer[1:start], "big")
    if size > limit:
        raise ProtocolError(too_large, f"a frame of {size} bytes; {limit} are allowed")
    end = start + size
    if len(buffer) < end:
        return None
    body = bytes(memoryview(buffer)[start:end])
    del buffer[:end]
    return Frame(flags & COMMAND != 0, flags & MORE != 0, body)


def take_message(buffer: bytearray, frame_bytes: int, message_bytes: int, frames: int) -> list[bytes] | None:
    """Remove a complete message from the beginning of the buffer, and return its frames.

    This is :func:`take_frame` for the usual message, in a sixth of the time. Return None, and leave the buffer as it
    is, if the buffer begins with anything else: an incomplete message, a command, a malformed frame, or a message that
    exceeds a limit.

    Args:
        buffer: the received bytes.
        frame_bytes: maximum bytes of a frame's body.
        message_bytes: maximum bytes of the encoded message.
        frames: maximum number of frames.
    """
    taken: list[bytes] = []
    position, end = 0, min(len(buffer), message_bytes)
    while position + _SHORT_HEAD <= end:
        flags = buffer[position]
        if flags & LONG:
            start = position + _LONG_HEAD
            size = int.from_bytes(buffer[position + 1 : start], "big")
        else:
            start = position + _SHORT_HEAD
            size = buffer[position + 1]
        position = start + size
        if flags > MORE | LONG or size > frame_bytes or position > end or len(taken) == frames:
            return None
        # the second form copies the bytes only once, but takes longer for few bytes
        few = size < _FEW
        taken.append(bytes(buffer[start:position]) if few else bytes(memoryview(buffer)[start:position]))
        if not flags & MORE:
            del buffer[:position]
            return taken
    return None


# -- commands ---------------------------------------------------------------------------------------------------------

READY: Final = b"READY"
ERROR: Final = b"ERROR"
PING: Final = b"PING"
PONG: Final = b"PONG"
SUBSCRIBE: Final = b"SUBSCRIBE"
CANCEL: Final = b"CANCEL"

PEER_SAYS: Final = "the peer says: "
"""The beginning of the description of an ERROR command. The peer's reason follows."""

_TTL_BYTES: Final = 2
_MAX_CONTEXT: Final = 16
_MAX_ERROR: Final = 255


def encode_command(body: bytes) -> bytes:
    """Encode a command frame from the command's complete body."""
    return head(len(body), COMMAND) + body


def command(name: bytes, data: bytes = b"") -> bytes:
    """Encode a command frame from the command's name and data."""
    return encode_command(bytes((len(name),)) + name + data)


def parse_command(body: bytes) -> tuple[bytes, bytes]:
    """Split the body of a command frame into the command's name and data.

    Raises:
        ProtocolError: the command has no name.
    """
    if not body or not body[0] or len(body) <= body[0]:
        raise ProtocolError(Reason.COMMAND, "a command without a name")
    end = 1 + body[0]
    return body[1:end], body[end:]


def subscribe(topic: bytes, version: tuple[int, int]) -> bytes:
    """Encode a subscription to a topic. In ZMTP 3.1 it is a command, and in ZMTP 3.0 a message.

    Args:
        topic: prefix of the topics.
        version: the ZMTP version of the connection, major and minor.
    """
    return command(SUBSCRIBE, topic) if version >= (3, 1) else encode_message([b"\1" + topic])


def encode_metadata(properties: dict[bytes, bytes]) -> bytes:
    """Encode the properties of a READY command."""
    return b"".join(
        bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value for name, value in properties.items()
    )


def parse_metadata(data: bytes) -> dict[bytes, bytes]:
    """Parse the properties of a READY command. Their names are returned in lower case, because ZMTP ignores the case.

    Raises:
        ProtocolError: the properties are malformed.
    """
    properties: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        name_end = position + 1 + data[position]
        value_start = name_end + 4
        value_end = value_start + int.from_bytes(data[name_end:value_start], "big")
        if not data[position] or value_end > len(data) or value_start > len(data):
            raise ProtocolError(Reason.COMMAND, "malformed properties")
        properties[data[position + 1 : name_end].lower()] = data[value_start:value_end]
        position = value_end
    return properties


def error(text: str) -> bytes:
    """Encode an ERROR command. Its reason is cut to 255 ASCII characters."""
    reason = text.encode("ascii", "replace")[:_MAX_ERROR]
    return command(ERROR, bytes((len(reason),)) + reason)


def refusal(data: bytes) -> ProtocolError:
    """Return the exception to raise after an ERROR command from the peer.

    Args:
        data: the data of the command, which contain the peer's reason.
    """
    return ProtocolError(Reason.REFUSED, PEER_SAYS + data[1:].decode("ascii", "replace"))


def pong(ping: bytes) -> bytes:
    """Encode the PONG that answers a PING. The PONG repeats the PING's context.

    Args:
        ping: the data of the PING command.

    Raises:
        ProtocolError: the PING is malformed.
    """
    if len(ping) < _TTL_BYTES:
        raise ProtocolError(Reason.COMMAND, "a PING without a time to live")
    return command(PONG, ping[_TTL_BYTES : _TTL_BYTES + _MAX_CONTEXT])
