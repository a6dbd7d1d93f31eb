"""The live streams of engines. kvbus reads them with its own ZMTP implementation, without libzmq.

kvbus connects to an engine (:class:`DialledStream`), or engines connect to kvbus (:class:`AcceptedStream`). kvbus
passes on each batch as soon as it has read it, so unread batches wait in the kernel and at the engine. A message
without an end costs little memory, because kvbus keeps only its first frames, and limits its frames and bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from kvbus.core import types
from kvbus.core.types import Refused
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.zmtp.addresses import host_of
from kvbus.transport.zmtp.endpoint import MAX_READ, Dialler, Listener
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.protocol import Limits
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.settings import Settings
from kvbus.transport.zmtp.wire import PEER_SAYS, subscribe
from kvbus.transport.zmtp_keys import Keys

KEPT_FRAMES: Final = 64
"""Maximum number of frames that kvbus keeps of each message.

Further frames are read and dropped. The core then rejects the message because of its number of frames.
"""

MAX_FRAMES: Final = 1_024
"""Maximum number of frames of one message. A further frame closes the connection. A batch has three frames."""

BROKEN: Final[dict[str, types.Reason]] = {
    Reason.FRAME_BYTES: types.Reason.FRAME_SIZE,
    Reason.MESSAGE_BYTES: types.Reason.MESSAGE_SIZE,
    Reason.MESSAGE_FRAMES: types.Reason.MESSAGE_SIZE,
    Reason.FRAME: types.Reason.ZMTP,
    Reason.COMMAND: types.Reason.ZMTP,
    Reason.NONCE: types.Reason.ZMTP,
    Reason.SEAL: types.Reason.ZMTP,
    Reason.UNREAD_PONGS: types.Reason.ZMTP,
    Reason.REFUSED: types.Reason.ZMTP,
}
"""Maps the reason why kvbus closed an open connection to the reason that the source counts."""

_REFUSED: Final[dict[str, Refused]] = {
    Reason.KEY: Refused.KEY,
    Reason.MECHANISM: Refused.MECHANISM,
    Reason.HANDSHAKE_TIMEOUT: Refused.CLOSED,
    Reason.HALF_OPEN: Refused.CLOSED,
    Reason.TOO_MANY_PEERS: Refused.CLOSED,
    Reason.NO_DESCRIPTOR: Refused.CLOSED,
    Reason.REFUSED: Refused.CLOSED,
    Reason.LEFT: Refused.CLOSED,
    Reason.BROKEN: Refused.CLOSED,
}
"""Maps the reason why the handshake with an engine failed to the reason that the source reports.

Every reason that is not listed here is reported as PROTOCOL.
"""

_KEY_REJECTED: Final = frozenset(f"{PEER_SAYS}{status}" for status in (300, 400, 500))
"""Details of a handshake in which the engine did not accept kvbus's key.

A libzmq peer answers with the status code of its authenticator (https://rfc.zeromq.org/spec/27/).
"""


def _ignore(*_: object) -> None:
    return


@dataclass(frozen=True, slots=True)
class Events:
    """The callbacks for the messages and connections of an engine's live stream.

    Attributes:
        message: called with the frames of each message.
        connection: called with True when the first connection is made, and with False when the last connection is lost.
        refused: called after each failed handshake, with the reason for the failure.
        broken: called when kvbus has closed a connection because of a limit or a violation of ZMTP, with the reason and
            a description. kvbus, or the engine, then connects again.
        drained: called after each burst of messages; None for no call.
    """

    message: Callable[[list[bytes]], None]
    connection: Callable[[bool], None]
    refused: Callable[[Refused], None] = _ignore
    broken: Callable[[types.Reason, str], None] = _ignore
    drained: Callable[[], None] | None = None


def _settings(policy: PeerPolicy) -> Settings:
    # Engines send large batches in bursts. With reads of 16 KiB, a batch of 10,000 bytes took twice the CPU time.
    return Settings(limits_of_publishers(policy.max_frame_bytes), read_bytes=MAX_READ)


def limits_of_publishers(frame_bytes: int) -> Limits:
    """Return the limits for the data that an engine sends on its connection.

    Args:
        frame_bytes: maximum bytes of one frame. A message may have four times as many bytes.
    """
    return Limits(
        frame_bytes=frame_bytes, message_frames=MAX_FRAMES, kept_frames=KEPT_FRAMES, message_bytes=4 * frame_bytes
    )


class EngineStream:
    """The live stream of one source, and the handler of its connections.

    A source has several connections if several publishers connect to kvbus. The source counts as connected while it has
    at least one connection.

    Args:
        topics: prefixes of the topics that kvbus subscribes to.
        events: the callbacks of the source.
    """

    def __init__(self, *, topics: Sequence[bytes], events: Events) -> None:
        self._topics = topics
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._peers: dict[int, Peer] = {}
        self._soon: asyncio.Handle | None = None
        self._closed = False

    @property
    def unread(self) -> bool:
        """Whether a publisher has sent bytes that kvbus has not decoded yet."""
        return any(peer.has_unread for peer in self._peers.values())

    def opened(self, peer: Peer) -> None:
        """Send kvbus's subscriptions to a connected publisher, and report the first connection."""
        peer.write(b"".join([subscribe(topic, peer.version) for topic in self._topics]))
        self._peers[peer.id] = peer
        if len(self._peers) == 1:
            self._events.connection(True)

    def received(self, peer: Peer, frames: list[bytes]) -> None:  # noqa: ARG002 - all peers publish for one source
        """Pass a batch to the source, and call the source's ``drained`` callback once after each burst of batches."""
        if self._closed:
            return
        self._events.message(frames)
        if self._soon is None and self._events.drained is not None:
            self._soon = self._loop.call_soon(self._drained, self._events.drained)

    def _drained(self, drained: Callable[[], None]) -> None:
        self._soon = None
        try:
            drained()
        except BaseException:  # the callback continues with the remaining batches
            self._soon = self._loop.call_soon(self._drained, drained)
            raise

    def closed(self, peer: Peer, reason: str) -> None:
        """Remove a connection. After the last one, report that the source is no longer connected."""
        del self._peers[peer.id]
        if self._closed:
            return
        broken = BROKEN.get(reason)
        if broken is not None:
            self._events.broken(broken, peer.detail or reason)
        if not self._peers:
            self._events.connection(False)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Do nothing, because a publisher does not subscribe."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Do nothing, because a publisher has no subscription to cancel."""

    def drained(self, peer: Peer) -> None:
        """Do nothing when an engine is writable again, because kvbus sends an engine only its subscriptions."""

    def close(self) -> None:
        """Close all connections of the source."""
        self._closed = True
        for peer in self._peers.values():
            peer.close(Reason.CLOSED)

    def _failed(self, reason: str, _address: str, detail: str) -> None:
        """Tell the source why the handshake of a connection failed."""
        refused = Refused.KEY if detail in _KEY_REJECTED else _REFUSED.get(reason, Refused.PROTOCOL)
        self._events.refused(refused)


class DialledStream(EngineStream):
    """The live stream of an engine to which kvbus connects.

    Args:
        endpoint: the endpoint of the engine's live stream, ``tcp://host:port`` or ``ipc://path``.
        topics: prefixes of the topics that kvbus subscribes to.
        events: the callbacks of the source.
        policy: kvbus's keys and the engine's public key, and the largest frame that kvbus accepts.

    Raises:
        BindError: the endpoint is malformed.
    """

    def __init__(self, endpoint: str, *, topics: Sequence[bytes], events: Events, policy: PeerPolicy) -> None:
        super().__init__(topics=topics, events=events)
        self._endpoint = endpoint
        self._dialler = Dialler(
            endpoint,
            Role.SUB,
            self,
            settings=_settings(policy),
            refused=self._failed,
            mechanism=Keys(policy.curve, bind=False).mechanism,
        )

    @property
    def reached(self) -> str | None:
        """The connected engine's TCP address; None without a connection, or if the engine is not on TCP."""
        return next((host_of(peer.address) for peer in self._peers.values()), None)

    def beside(self, endpoint: str) -> str:
        """Return an engine's endpoint with the connected address in place of its host name.

        By now the host name may resolve to the address of another engine, whose answers do not belong to this live
        stream. The endpoint is returned unchanged if its host is not that of the live stream, or if the live stream has
        no TCP connection.

        Args:
            endpoint: the replay or snapshot endpoint of the engine.
        """
        host, _, port = endpoint.rpartition(":")
        reached = self.reached
        if reached is None or host != self._endpoint.rpartition(":")[0]:
            return endpoint
        return f"tcp://[{reached}]:{port}" if ":" in reached else f"tcp://{reached}:{port}"

    def close(self) -> None:
        """Close the connection, and do not connect again."""
        self._closed = True
        self._dialler.close()


class AcceptedStream(EngineStream):
    """The live stream of one source whose publishers connect to kvbus."""

    @property
    def reached(self) -> None:
        """The address that kvbus has dialled. It is always None, because the publishers dial kvbus."""

    @property
    def peers(self) -> list[str]:
        """Addresses of the connected publishers."""
        return [peer.address for peer in self._peers.values()]

    def beside(self, endpoint: str) -> str:
        """Return the engine's replay or snapshot endpoint unchanged.

        :meth:`DialledStream.beside` replaces the host name by the connected address. Here the engine dials kvbus, so
        kvbus has looked up no host name.
        """
        return endpoint


class BoundStream(AcceptedStream):
    """The live stream of one source whose publishers connect to a port that kvbus opens only for this source.

    Args:
        endpoint: the endpoint to bind, ``tcp://host:port`` or ``ipc://path``.
        topics: prefixes of the topics that kvbus subscribes to.
        events: the callbacks of the source.
        policy: the rules for publishers: who may connect, and the largest frame that kvbus accepts.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, *, topics: Sequence[bytes], events: Events, policy: PeerPolicy) -> None:
        super().__init__(topics=topics, events=events)
        self._keys = Keys(policy.curve, bind=True)
        self._listener = Listener(
            endpoint,
            Role.SUB,
            self,
            settings=_settings(policy),
            refused=self._failed,
            mechanism=self._keys.mechanism,
        )

    def allow(self, clients: Collection[bytes]) -> None:
        """Replace the allow-list of CURVE keys, and disconnect every publisher whose key is not on the new list."""
        self._keys.allow(clients, self._listener.peers.values())

    def close(self) -> None:
        """Disconnect all publishers, and close the source's port."""
        self._closed = True
        self._listener.close()
