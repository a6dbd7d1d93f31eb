"""CURVE behind the handshake: each frame travels encrypted, in a MESSAGE of its own.

libzmq 4.3.5 sends MESSAGE as a message frame. RFC 37 calls it a command. Both are read here, and libzmq's is sent. The
frame's own flags, a command's included, are encrypted with its body.

Source: https://rfc.zeromq.org/spec/26/ ("The MESSAGE command").
"""

from __future__ import annotations

from typing import Final

from nacl._sodium import ffi, lib
from nacl.bindings import crypto_box_open_easy_afternm
from nacl.exceptions import CryptoError

from kvbus.transport.zmtp.frames import COMMAND, LONG, MORE, Frame
from kvbus.transport.zmtp.reasons import ProtocolError, Reason

CLIENT: Final = b"CurveZMQMESSAGEC"
"""The nonce's first bytes in messages of the side that dials."""
SERVER: Final = b"CurveZMQMESSAGES"
"""The nonce's first bytes in messages of the side that accepts."""

NONCE_BYTES: Final = 8
BOX_BYTES: Final = 16
"""Bytes that an encrypted text is longer than the text."""

_NAME: Final = b"\x07MESSAGE"
_HEAD: Final = len(_NAME) + NONCE_BYTES
_SEALED_COMMAND: Final = 2
_LAST: Final = b"\0"
_KINDS: Final = {0: _LAST, MORE: bytes([MORE]), COMMAND: bytes([_SEALED_COMMAND])}
_LONGEST_SHORT: Final = 255

_SCRATCH_BYTES: Final = 64 * 1024
_SCRATCH: Final = ffi.new("unsigned char[]", _SCRATCH_BYTES)
"""Where a box is made, unless it is longer. The event loop alone seals."""


def _box(plain: bytes, nonce: bytes, key: bytes) -> bytes:
    """Encrypt as ``nacl.bindings.crypto_box_easy_afternm`` does, which makes room anew for each box.

    That and its checks are a fifth of what sealing a short message costs. It cannot fail.
    """
    size = len(plain) + BOX_BYTES
    room = _SCRATCH if size <= _SCRATCH_BYTES else ffi.new("unsigned char[]", size)
    lib.crypto_box_easy_afternm(room, plain, len(plain), nonce, key)
    return bytes(ffi.buffer(room, size))


class Session:
    """Both directions of one connection.

    Args:
        key: what both sides have computed of their transient keys.
        accepting: True for the side that accepted the connection.
        sent: the number of our last nonce in the handshake.
        received: the number of the peer's last nonce.
    """

    overhead = _HEAD + BOX_BYTES + 1
    """Bytes that a sealed frame is longer than the frame's body."""

    __slots__ = ("_key", "_ours", "_received", "_sent", "_theirs")

    def __init__(self, key: bytes, *, accepting: bool, sent: int, received: int) -> None:
        self._key = key
        self._ours, self._theirs = (SERVER, CLIENT) if accepting else (CLIENT, SERVER)
        self._sent = sent
        self._received = received

    def seal(self, data: bytes) -> bytes:
        """Encrypt encoded frames, whole ones, each as a MESSAGE."""
        sealed: list[bytes] = []
        at, end = 0, len(data)
        key, ours, sent = self._key, self._ours, self._sent
        while at < end:
            flags = data[at]
            if flags & LONG:
                body = at + 9
                size = int.from_bytes(data[at + 1 : body], "big")
            else:
                body = at + 2
                size = data[at + 1]
            at = body + size
            sent += 1
            nonce = sent.to_bytes(NONCE_BYTES, "big")
            box = _box(_KINDS[flags & ~LONG] + data[body:at], ours + nonce, key)
            size = _HEAD + len(box)
            head = bytes((0, size)) if size <= _LONGEST_SHORT else b"\2" + size.to_bytes(8, "big")
            sealed += (head, _NAME, nonce, box)
        self._sent = sent
        return b"".join(sealed)

    def unseal(self, frame: Frame) -> Frame:
        """Return the frame that a MESSAGE holds.

        Raises:
            ProtocolError: it is no MESSAGE, it is forged, or it was received before.
        """
        body = frame.body
        if frame.more or len(body) < self.overhead or not body.startswith(_NAME):
            raise ProtocolError(Reason.COMMAND, "no MESSAGE where CURVE has one")
        nonce = body[len(_NAME) : _HEAD]
        number = int.from_bytes(nonce, "big")
        if number <= self._received:
            raise ProtocolError(Reason.NONCE, "a nonce that was used before")
        try:
            plain = crypto_box_open_easy_afternm(body[_HEAD:], self._theirs + nonce, self._key)
        except CryptoError:
            raise ProtocolError(Reason.SEAL, "a message that its key does not open") from None
        self._received = number
        kind = plain[0]
        if kind > _SEALED_COMMAND:
            raise ProtocolError(Reason.FRAME, f"a sealed frame with flags {kind:#04x}")
        return Frame(kind == _SEALED_COMMAND, kind == MORE, plain[1:])
