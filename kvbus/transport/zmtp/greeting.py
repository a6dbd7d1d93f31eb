"""The greeting: which ZMTP the peer speaks. It is refused at the first byte that shows that it cannot be understood.

A peer of ZMTP 2.0 takes byte 11 for a socket type, so kvbus sends only signature and version before it knows the peer's
version.

Source: https://rfc.zeromq.org/spec/37/ ("Version negotiation"), https://rfc.zeromq.org/spec/15/.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.roles import TYPES

SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
VERSION_2: Final = 1
"""The revision of a ZMTP 2.0 greeting."""
MAJOR: Final = 3
MINOR: Final = 1

OPENING: Final = SIGNATURE + bytes([MAJOR])
"""What is sent first, to every peer."""

_VERSION_AT: Final = 10
_SIZE_2: Final = 12
_SIZE_3: Final = 64
_MECHANISM_BYTES: Final = 20


class Greeting(NamedTuple):
    """A peer's greeting; ``socket_type`` is that of a ZMTP 2.0 peer, empty otherwise."""

    version: tuple[int, int]
    mechanism: bytes
    socket_type: bytes


def peer_major(buffer: bytes | bytearray) -> int | None:
    """Return the version byte of a greeting, None until it has arrived.

    Raises:
        ProtocolError: this is no greeting of ZMTP 2.0 or later.
    """
    if buffer and buffer[0] != SIGNATURE[0]:
        raise ProtocolError(Reason.GREETING, f"the first byte is {buffer[0]:#04x}: ZMTP 1.0, or no ZMTP")
    if len(buffer) >= _VERSION_AT and buffer[_VERSION_AT - 1] != SIGNATURE[-1]:
        raise ProtocolError(Reason.GREETING, "the signature is not that of ZMTP 2.0 or later")
    if len(buffer) <= _VERSION_AT:
        return None
    major = buffer[_VERSION_AT]
    if major != VERSION_2 and major < MAJOR:
        raise ProtocolError(Reason.VERSION, f"ZMTP version byte {major}")
    return major


def rest(major: int, socket_type: bytes, mechanism: bytes) -> bytes:
    """Return the rest of our greeting, after :data:`OPENING`, for a peer of this version."""
    if major == VERSION_2:
        return bytes([TYPES.index(socket_type)])
    return bytes([MINOR]) + mechanism.ljust(_MECHANISM_BYTES, b"\0") + bytes(_SIZE_3 - _SIZE_2 - _MECHANISM_BYTES)


def take_greeting(buffer: bytearray, major: int) -> Greeting | None:
    """Take a whole greeting off the buffer, or return None until it has arrived.

    Raises:
        ProtocolError: a socket type that ZMTP 2.0 does not know.
    """
    size = _SIZE_2 if major == VERSION_2 else _SIZE_3
    if len(buffer) < size:
        return None
    greeting = bytes(buffer[:size])
    del buffer[:size]
    if major != VERSION_2:
        mechanism = greeting[_SIZE_2 : _SIZE_2 + _MECHANISM_BYTES].rstrip(b"\0")
        # a later version understands ours
        version = (MAJOR, min(greeting[_SIZE_2 - 1], MINOR)) if major == MAJOR else (MAJOR, MINOR)
        return Greeting(version, mechanism, b"")
    number = greeting[_SIZE_2 - 1]
    if number >= len(TYPES):
        raise ProtocolError(Reason.SOCKET_TYPE, f"socket type {number}")
    return Greeting((2, 0), b"", TYPES[number])
