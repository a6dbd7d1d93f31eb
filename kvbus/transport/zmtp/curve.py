"""CURVE for kvbus's own ZMTP: each side proves that it owns its key, and each connection has new transient keys.

The side that dials is the client. It knows the server's public key, and sends HELLO with a transient key. The server
answers WELCOME with its own transient key and a cookie. The client sends INITIATE with the cookie, its public key, and
the proof (the vouch) that it owns the matching secret key. Only then does the server check its allow-list. READY ends
the handshake. The server uses its transient key and its cookie for one connection and only once, so a recorded
handshake cannot be replayed.

After the handshake each frame is encrypted in a separate MESSAGE. libzmq 4.3.5 sends MESSAGE as a message frame, but
RFC 37 calls it a command. kvbus reads both forms and sends libzmq's form. The flags of the inner frame are encrypted
with its body.

Source: https://rfc.zeromq.org/spec/26/, https://rfc.zeromq.org/spec/25/.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nacl.exceptions import CryptoError
from nacl.public import Box, PrivateKey, PublicKey

from kvbus.transport.zmtp import wire
from kvbus.transport.zmtp.mechanism import Role, Sealing, ready_properties
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.wire import COMMAND, LONG, MORE, Frame

if TYPE_CHECKING:
    from kvbus.transport.zmtp.peer import Peer

HELLO: Final = b"HELLO"
WELCOME: Final = b"WELCOME"
INITIATE: Final = b"INITIATE"

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 8
BOX_BYTES: Final = 16
"""Number of bytes that encryption adds to a plain text."""

CLIENT: Final = b"CurveZMQMESSAGEC"
"""The first bytes of the nonce of each encrypted message from the side that has dialled."""
SERVER: Final = b"CurveZMQMESSAGES"
"""The first bytes of the nonce of each encrypted message from the side that has accepted the connection."""

_LONG_NONCE: Final = 16
_VERSION: Final = b"\1\0" + bytes(72)
_SIGNED: Final = bytes(64)
_COOKIE_BYTES: Final = _LONG_NONCE + 2 * KEY_BYTES + BOX_BYTES
_VOUCH_BYTES: Final = 2 * KEY_BYTES + BOX_BYTES
_HELLO_BYTES: Final = len(_VERSION) + KEY_BYTES + NONCE_BYTES + len(_SIGNED) + BOX_BYTES
_WELCOME_BYTES: Final = _LONG_NONCE + KEY_BYTES + _COOKIE_BYTES + BOX_BYTES
_INITIATE_BYTES: Final = _COOKIE_BYTES + NONCE_BYTES + KEY_BYTES + _LONG_NONCE + _VOUCH_BYTES + BOX_BYTES
_READY_BYTES: Final = NONCE_BYTES + BOX_BYTES

# the first bytes of the nonce of each command in the handshake
_OF_HELLO: Final = b"CurveZMQHELLO---"
_OF_WELCOME: Final = b"WELCOME-"
_OF_INITIATE: Final = b"CurveZMQINITIATE"
_OF_VOUCH: Final = b"VOUCH---"
_OF_READY: Final = b"CurveZMQREADY---"

# the name of the MESSAGE command, the length of its head, and the flags of the frame that is encrypted in it
_NAME: Final = b"\x07MESSAGE"
_HEAD: Final = len(_NAME) + NONCE_BYTES
_SEALED_COMMAND: Final = 2
_KINDS: Final = {0: b"\0", MORE: b"\1", COMMAND: b"\2"}


@dataclass(slots=True)
class ServerKeys:
    """The CURVE keys of an endpoint that accepts connections.

    Attributes:
        public: kvbus's public key, 32 raw bytes.
        secret: kvbus's secret key, 32 raw bytes.
        clients: public keys of the peers that may connect, 32 raw bytes each.
        private: kvbus's secret key as a PyNaCl object.
    """

    public: bytes
    secret: bytes = field(repr=False)
    clients: Collection[bytes] = field(repr=False)
    private: PrivateKey = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.private = PrivateKey(self.secret)

    def mechanism(self, role: Role) -> Server:
        """Return kvbus's side of the handshake of one accepted connection."""
        return Server(self, role)

    def allow(self, clients: Collection[bytes], peers: Iterable[Peer]) -> None:
        """Replace the allow-list, and disconnect every peer whose key is not on the new list.

        Args:
            clients: public keys of the peers that may connect, 32 raw bytes each.
            peers: the connected peers.
        """
        self.clients = clients
        for peer in list(peers):
            if peer.key not in clients:
                peer.close(Reason.REVOKED)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The CURVE keys of an endpoint that dials.

    Attributes:
        public: kvbus's public key, 32 raw bytes.
        secret: kvbus's secret key, 32 raw bytes.
        server: public key of the peer that kvbus dials, 32 raw bytes.
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def mechanism(self, role: Role) -> Client:
        """Return kvbus's side of the handshake of one dialled connection."""
        return Client(self, role)


class Server:
    """kvbus's side of the CURVE handshake of a connection that kvbus has accepted.

    Args:
        keys: kvbus's keys and the allow-list.
        role: kvbus's socket type, and the socket types that the peer may have.
    """

    name = b"CURVE"

    def __init__(self, keys: ServerKeys, role: Role) -> None:
        self.expected = HELLO
        self.peer: dict[bytes, bytes] | None = None
        self.peer_key = b""
        self.sealing: Sealing | None = None

        self._keys = keys
        self._role = role

        # Needed until INITIATE: the peer's transient key and last nonce, kvbus's transient key, and the cookie.
        self._client = b""
        self._received = 0
        self._transient: PrivateKey | None = None
        self._cookie = b""

    def start(self) -> bytes:
        """Return no bytes, because the client sends the first command, HELLO."""
        return b""

    def receive(self, data: bytes) -> bytes:
        """Process the client's HELLO and return a WELCOME, or process its INITIATE and return a READY."""
        try:
            return self._hello(data) if self.expected == HELLO else self._initiate(data)
        except CryptoError:
            text = "the handshake cannot be decrypted: it was made for another public key, or it is forged"
            raise ProtocolError(Reason.CURVE, text) from None

    def _hello(self, data: bytes) -> bytes:
        self.expected = INITIATE
        if len(data) != _HELLO_BYTES or not data.startswith(_VERSION):
            raise ProtocolError(Reason.COMMAND, "a malformed HELLO")
        self._client, nonce, signed = _split(data[len(_VERSION) :], KEY_BYTES, NONCE_BYTES)
        self._received = int.from_bytes(nonce, "big")
        box = Box(self._keys.private, PublicKey(self._client))
        if not hmac.compare_digest(box.decrypt(signed, _OF_HELLO + nonce), _SIGNED):
            raise ProtocolError(Reason.COMMAND, "a malformed HELLO")
        self._transient = PrivateKey.generate()
        self._cookie = secrets.token_bytes(_COOKIE_BYTES)
        nonce = secrets.token_bytes(_LONG_NONCE)
        welcome = _encrypt(box, self._transient.public_key.encode() + self._cookie, _OF_WELCOME + nonce)
        return wire.command(WELCOME, nonce + welcome)

    def _initiate(self, data: bytes) -> bytes:
        transient, self._transient = self._transient, None
        if transient is None or len(data) < _INITIATE_BYTES:
            raise ProtocolError(Reason.COMMAND, "a malformed INITIATE")
        cookie, nonce, sealed = _split(data, _COOKIE_BYTES, NONCE_BYTES)
        if not hmac.compare_digest(cookie, self._cookie):
            raise ProtocolError(Reason.CURVE, "the cookie of another handshake")
        received = int.from_bytes(nonce, "big")
        if received <= self._received:
            raise ProtocolError(Reason.NONCE, "a nonce that was used before")
        box = Box(transient, PublicKey(self._client))
        plain = box.decrypt(sealed, _OF_INITIATE + nonce)
        owner, vouch_nonce, vouch, properties = _split(plain, KEY_BYTES, _LONG_NONCE, _VOUCH_BYTES)

        # The vouch proves that the owner of the peer's secret key made this transient key for a server with kvbus's
        # public key.
        vouched = Box(transient, PublicKey(owner)).decrypt(vouch, _OF_VOUCH + vouch_nonce)
        if not hmac.compare_digest(vouched, self._client + self._keys.public):
            raise ProtocolError(Reason.CURVE, "the client's vouch is for another connection or server")
        if owner not in self._keys.clients:
            raise ProtocolError(Reason.KEY, "a client key that is not on the allow-list")
        self.peer = wire.parse_metadata(properties)
        self.peer_key = owner
        self.sealing = Session(box, accepting=True, sent=1, received=received)
        nonce = (1).to_bytes(NONCE_BYTES, "big")
        return wire.command(wire.READY, nonce + _encrypt(box, ready_properties(self._role), _OF_READY + nonce))


class Client:
    """kvbus's side of the CURVE handshake of a connection that kvbus has dialled.

    Args:
        keys: kvbus's keys and the peer's public key.
        role: kvbus's socket type, and the socket types that the peer may have.
    """

    name = b"CURVE"

    def __init__(self, keys: ClientKeys, role: Role) -> None:
        self.expected = WELCOME
        self.peer: dict[bytes, bytes] | None = None
        self.peer_key = keys.server
        self.sealing: Sealing | None = None

        self._keys = keys
        self._role = role
        transient = PrivateKey.generate()
        self._public = transient.public_key.encode()
        self._transient: PrivateKey | None = transient
        self._box = Box(transient, PublicKey(keys.server))
        """Encrypts kvbus's part of the handshake. Until WELCOME arrives, it uses the server's permanent key, and then
        the server's transient key.
        """

    def start(self) -> bytes:
        """Return a HELLO, the first command of the handshake."""
        nonce = (1).to_bytes(NONCE_BYTES, "big")
        signed = _encrypt(self._box, _SIGNED, _OF_HELLO + nonce)
        return wire.command(HELLO, _VERSION + self._public + nonce + signed)

    def receive(self, data: bytes) -> bytes:
        """Process the server's WELCOME and return an INITIATE, or process its READY and return no bytes."""
        try:
            return self._welcome(data) if self.expected == WELCOME else self._ready(data)
        except CryptoError:
            text = "the handshake cannot be decrypted: the peer has another key, or it is forged"
            raise ProtocolError(Reason.CURVE, text) from None

    def _welcome(self, data: bytes) -> bytes:
        self.expected = wire.READY
        transient, self._transient = self._transient, None
        if transient is None or len(data) != _WELCOME_BYTES:
            raise ProtocolError(Reason.COMMAND, "a malformed WELCOME")
        keys = self._keys
        nonce, sealed = _split(data, _LONG_NONCE)
        server, cookie = _split(self._box.decrypt(sealed, _OF_WELCOME + nonce), KEY_BYTES)
        self._box = Box(transient, PublicKey(server))

        vouch_nonce, nonce = secrets.token_bytes(_LONG_NONCE), (2).to_bytes(NONCE_BYTES, "big")
        vouch = _encrypt(
            Box(PrivateKey(keys.secret), PublicKey(server)), self._public + keys.server, _OF_VOUCH + vouch_nonce
        )
        plain = keys.public + vouch_nonce + vouch + ready_properties(self._role)
        return wire.command(INITIATE, cookie + nonce + _encrypt(self._box, plain, _OF_INITIATE + nonce))

    def _ready(self, data: bytes) -> bytes:
        if len(data) < _READY_BYTES:
            raise ProtocolError(Reason.COMMAND, "a malformed READY")
        nonce, sealed = _split(data, NONCE_BYTES)
        self.peer = wire.parse_metadata(self._box.decrypt(sealed, _OF_READY + nonce))
        self.sealing = Session(self._box, accepting=False, sent=2, received=int.from_bytes(nonce, "big"))
        return b""


class Session:
    """The encryption of one connection after its handshake, in both directions.

    Args:
        box: encrypts and decrypts with a key made from the transient keys of both sides.
        accepting: True if kvbus has accepted the connection, False if it has dialled.
        sent: number of kvbus's last nonce in the handshake.
        received: number of the peer's last nonce in the handshake.
    """

    overhead = _HEAD + BOX_BYTES + 1
    """Number of bytes by which encryption makes the body of a frame longer."""

    def __init__(self, box: Box, *, accepting: bool, sent: int, received: int) -> None:
        self._box = box
        self._ours, self._theirs = (SERVER, CLIENT) if accepting else (CLIENT, SERVER)
        self._sent = sent
        self._received = received

    def seal(self, data: bytes) -> bytes:
        """Encrypt encoded ZMTP frames, and return one MESSAGE command for each frame.

        ``data`` has only complete frames.
        """
        sealed: list[bytes] = []
        position, end = 0, len(data)
        while position < end:
            flags = data[position]
            start = position + (9 if flags & LONG else 2)
            position = start + int.from_bytes(data[position + 1 : start], "big")
            self._sent += 1
            nonce = self._sent.to_bytes(NONCE_BYTES, "big")
            box = _encrypt(self._box, _KINDS[flags & ~LONG] + data[start:position], self._ours + nonce)
            sealed += (wire.head(_HEAD + len(box)), _NAME, nonce, box)
        return b"".join(sealed)

    def unseal(self, frame: Frame) -> Frame:
        """Decrypt a MESSAGE, and return the frame that was encrypted in it.

        Raises:
            ProtocolError: the received frame is not a MESSAGE, is forged, or was received before.
        """
        body = frame.body
        if frame.more or len(body) < self.overhead or not body.startswith(_NAME):
            raise ProtocolError(Reason.COMMAND, "a frame that is not a CURVE MESSAGE")
        nonce = body[len(_NAME) : _HEAD]
        number = int.from_bytes(nonce, "big")
        if number <= self._received:
            raise ProtocolError(Reason.NONCE, "a nonce that was used before")
        try:
            plain = self._box.decrypt(body[_HEAD:], self._theirs + nonce)
        except CryptoError:
            raise ProtocolError(Reason.SEAL, "a message that cannot be decrypted") from None
        self._received = number
        kind = plain[0]
        if kind > _SEALED_COMMAND:
            raise ProtocolError(Reason.FRAME, f"an encrypted frame with the unknown flags {kind:#04x}")
        return Frame(kind == _SEALED_COMMAND, kind == MORE, plain[1:])


def _encrypt(box: Box, plain: bytes, nonce: bytes) -> bytes:
    return box.encrypt(plain, nonce).ciphertext


def _split(data: bytes, *sizes: int) -> list[bytes]:
    """Split data into parts of these sizes. The last item of the result is the remaining bytes."""
    parts = []
    position = 0
    for size in sizes:
        parts.append(data[position : position + size])
        position += size
    return [*parts, data[position:]]
