"""CURVE: who a peer is, by its public key, and transient keys for this connection alone.

The side that dials is the client. It knows the server's public key, and says HELLO with a transient key. The server
answers WELCOME, with a transient key of its own and a cookie, in which it has put all it needs to go on: it keeps only
the cookie's key. INITIATE brings the cookie back, the client's public key, and the proof (the vouch) that the client
has the secret key to it. Only then the allow-list is asked. READY ends the handshake.

A cookie's key is for one connection and for one use, so a handshake that somebody has recorded opens nothing.

Source: https://rfc.zeromq.org/spec/26/, https://rfc.zeromq.org/spec/25/.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from nacl.bindings import (
    crypto_box_beforenm,
    crypto_box_easy,
    crypto_box_easy_afternm,
    crypto_box_keypair,
    crypto_box_open_easy,
    crypto_box_open_easy_afternm,
    crypto_secretbox_easy,
    crypto_secretbox_open_easy,
)
from nacl.exceptions import CryptoError

from kvbus.transport.zmtp import commands
from kvbus.transport.zmtp.mechanism import Sealing, check_properties, ready_properties
from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.roles import Role
from kvbus.transport.zmtp.sealing import BOX_BYTES, NONCE_BYTES, Session

HELLO: Final = b"HELLO"
WELCOME: Final = b"WELCOME"
INITIATE: Final = b"INITIATE"

KEY_BYTES: Final = 32
COOKIE_SECONDS: Final = 60.0
"""Seconds in which a cookie may come back."""

_LONG_NONCE: Final = 16
_VERSION: Final = b"\1\0"
_PADDING: Final = bytes(72)
_SIGNED: Final = bytes(64)
_COOKIE_BYTES: Final = _LONG_NONCE + 2 * KEY_BYTES + BOX_BYTES
_VOUCH_BYTES: Final = 2 * KEY_BYTES + BOX_BYTES
_HELLO_BYTES: Final = len(_VERSION) + len(_PADDING) + KEY_BYTES + NONCE_BYTES + len(_SIGNED) + BOX_BYTES
_WELCOME_BYTES: Final = _LONG_NONCE + KEY_BYTES + _COOKIE_BYTES + BOX_BYTES
_INITIATE_BYTES: Final = _COOKIE_BYTES + NONCE_BYTES + KEY_BYTES + _LONG_NONCE + _VOUCH_BYTES + BOX_BYTES
_READY_BYTES: Final = NONCE_BYTES + BOX_BYTES

# The nonces' first bytes.
_OF_HELLO: Final = b"CurveZMQHELLO---"
_OF_WELCOME: Final = b"WELCOME-"
_OF_COOKIE: Final = b"COOKIE--"
_OF_INITIATE: Final = b"CurveZMQINITIATE"
_OF_VOUCH: Final = b"VOUCH---"
_OF_READY: Final = b"CurveZMQREADY---"


@dataclass(slots=True)
class ServerKeys:
    """The keys of an endpoint that accepts.

    Attributes:
        public: our public key, 32 raw bytes.
        secret: our secret key.
        clients: public keys of the peers that may connect.
    """

    public: bytes
    secret: bytes = field(repr=False)
    clients: Collection[bytes] = field(repr=False)

    def mechanism(self, role: Role) -> Server:
        """Return the mechanism of one connection."""
        return Server(self, role)

    def allow(self, clients: Collection[bytes], peers: Iterable[Peer]) -> None:
        """Replace the list, and end the connections of those peers that are not on it any more."""
        self.clients = clients
        for peer in list(peers):
            if peer.key not in clients:
                peer.close(Reason.REVOKED)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of an endpoint that dials.

    Attributes:
        public: our public key, 32 raw bytes.
        secret: our secret key.
        server: public key of the peer.
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def mechanism(self, role: Role) -> Client:
        """Return the mechanism of one connection."""
        return Client(self, role)


class Server:
    """The accepting side of one handshake.

    Args:
        keys: the endpoint's.
        role: our socket type, and the peers it accepts.
        clock: seconds, for the cookie.
    """

    name = b"CURVE"

    def __init__(self, keys: ServerKeys, role: Role, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.peer: dict[bytes, bytes] | None = None
        self.peer_key = b""
        self.sealing: Sealing | None = None

        self._keys = keys
        self._role = role
        self._clock = clock
        self._expected = HELLO

        # Between WELCOME and INITIATE: what opens the cookie, until when, and the peer's last nonce.
        self._cookie_key = b""
        self._cookie_until = 0.0
        self._received = 0

    def start(self) -> bytes:
        """Wait for HELLO."""
        return b""

    def receive(self, name: bytes, data: bytes) -> bytes:
        """Take in HELLO and return WELCOME, or INITIATE and return READY."""
        if name == commands.ERROR:
            raise commands.refusal(data)
        if name != self._expected:
            raise ProtocolError(Reason.COMMAND, f"{name!r} in place of {self._expected.decode()}")
        self._expected = INITIATE
        try:
            return self._hello(data) if name == HELLO else self._initiate(data)
        except CryptoError:
            text = "a handshake that the keys do not open: made for another key of ours, or forged"
            raise ProtocolError(Reason.CURVE, text) from None

    def _hello(self, data: bytes) -> bytes:
        if len(data) != _HELLO_BYTES or not data.startswith(_VERSION + _PADDING):
            raise ProtocolError(Reason.COMMAND, "a malformed HELLO")
        client, nonce, box = _split(data[len(_VERSION) + len(_PADDING) :], KEY_BYTES, NONCE_BYTES)
        key = crypto_box_beforenm(client, self._keys.secret)
        if not hmac.compare_digest(crypto_box_open_easy_afternm(box, _OF_HELLO + nonce, key), _SIGNED):
            raise ProtocolError(Reason.COMMAND, "a malformed HELLO")
        self._received = int.from_bytes(nonce, "big")

        public, secret = crypto_box_keypair()
        self._cookie_key = secrets.token_bytes(KEY_BYTES)
        self._cookie_until = self._clock() + COOKIE_SECONDS
        cookie_nonce, nonce = secrets.token_bytes(_LONG_NONCE), secrets.token_bytes(_LONG_NONCE)
        cookie = cookie_nonce + crypto_secretbox_easy(client + secret, _OF_COOKIE + cookie_nonce, self._cookie_key)
        return commands.command(WELCOME, nonce + crypto_box_easy_afternm(public + cookie, _OF_WELCOME + nonce, key))

    def _initiate(self, data: bytes) -> bytes:
        cookie_key, self._cookie_key = self._cookie_key, b""
        if len(data) < _INITIATE_BYTES:
            raise ProtocolError(Reason.COMMAND, "a malformed INITIATE")
        if self._clock() > self._cookie_until:
            raise ProtocolError(Reason.CURVE, "a cookie that has expired")
        cookie_nonce, cookie, nonce, box = _split(data, _LONG_NONCE, _COOKIE_BYTES - _LONG_NONCE, NONCE_BYTES)
        client, secret = _split(crypto_secretbox_open_easy(cookie, _OF_COOKIE + cookie_nonce, cookie_key), KEY_BYTES)
        received = int.from_bytes(nonce, "big")
        if received <= self._received:
            raise ProtocolError(Reason.NONCE, "a nonce that was used before")
        key = crypto_box_beforenm(client, secret)
        plain = crypto_box_open_easy_afternm(box, _OF_INITIATE + nonce, key)
        owner, vouch_nonce, vouch, properties = _split(plain, KEY_BYTES, _LONG_NONCE, _VOUCH_BYTES)

        # the peer is who it says: its secret key vouches for this connection, and for us
        vouched = crypto_box_open_easy(vouch, _OF_VOUCH + vouch_nonce, owner, secret)
        if not hmac.compare_digest(vouched, client + self._keys.public):
            raise ProtocolError(Reason.CURVE, "a vouch for another connection")
        if owner not in self._keys.clients:
            raise ProtocolError(Reason.KEY, "a key that is not on the list")
        self.peer = check_properties(self._role, properties)
        self.peer_key = owner
        self.sealing = Session(key, accepting=True, sent=1, received=received)
        nonce = (1).to_bytes(NONCE_BYTES, "big")
        box = crypto_box_easy_afternm(ready_properties(self._role), _OF_READY + nonce, key)
        return commands.command(commands.READY, nonce + box)


class Client:
    """The dialling side of one handshake.

    Args:
        keys: the endpoint's.
        role: our socket type, and the peers it accepts.
    """

    name = b"CURVE"

    def __init__(self, keys: ClientKeys, role: Role) -> None:
        self.peer: dict[bytes, bytes] | None = None
        self.peer_key = keys.server
        self.sealing: Sealing | None = None

        self._keys = keys
        self._role = role
        self._expected = WELCOME

        # For this connection: our transient keys until INITIATE is sent, then what they make with the peer's.
        self._public, self._secret = crypto_box_keypair()
        self._key = b""

    def start(self) -> bytes:
        """Return HELLO."""
        nonce = (1).to_bytes(NONCE_BYTES, "big")
        box = crypto_box_easy(_SIGNED, _OF_HELLO + nonce, self._keys.server, self._secret)
        return commands.command(HELLO, _VERSION + _PADDING + self._public + nonce + box)

    def receive(self, name: bytes, data: bytes) -> bytes:
        """Take in WELCOME and return INITIATE, or READY and return nothing."""
        if name == commands.ERROR:
            raise commands.refusal(data)
        if name != self._expected:
            raise ProtocolError(Reason.COMMAND, f"{name!r} in place of {self._expected.decode()}")
        self._expected = commands.READY
        try:
            return self._welcome(data) if name == WELCOME else self._ready(data)
        except CryptoError:
            text = "a handshake that the keys do not open: the peer has another key, or it is forged"
            raise ProtocolError(Reason.CURVE, text) from None

    def _welcome(self, data: bytes) -> bytes:
        if len(data) != _WELCOME_BYTES:
            raise ProtocolError(Reason.COMMAND, "a malformed WELCOME")
        keys = self._keys
        nonce, box = _split(data, _LONG_NONCE)
        server, cookie = _split(crypto_box_open_easy(box, _OF_WELCOME + nonce, keys.server, self._secret), KEY_BYTES)
        self._key = crypto_box_beforenm(server, self._secret)
        self._secret = b""

        vouch_nonce, nonce = secrets.token_bytes(_LONG_NONCE), (2).to_bytes(NONCE_BYTES, "big")
        vouch = crypto_box_easy(self._public + keys.server, _OF_VOUCH + vouch_nonce, server, keys.secret)
        plain = keys.public + vouch_nonce + vouch + ready_properties(self._role)
        box = crypto_box_easy_afternm(plain, _OF_INITIATE + nonce, self._key)
        return commands.command(INITIATE, cookie + nonce + box)

    def _ready(self, data: bytes) -> bytes:
        if len(data) < _READY_BYTES:
            raise ProtocolError(Reason.COMMAND, "a malformed READY")
        key, self._key = self._key, b""
        nonce, box = _split(data, NONCE_BYTES)
        plain = crypto_box_open_easy_afternm(box, _OF_READY + nonce, key)
        self.peer = check_properties(self._role, plain)
        self.sealing = Session(key, accepting=False, sent=2, received=int.from_bytes(nonce, "big"))
        return b""


def _split(data: bytes, *sizes: int) -> list[bytes]:
    """Split data into parts of these sizes, and the rest."""
    parts = []
    at = 0
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return [*parts, data[at:]]
