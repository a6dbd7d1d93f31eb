"""All options that kvbus sets on libzmq sockets, in one table, with the reasons for their values."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import zmq

from kvbus.common.errors import BindError, UnsupportedError
from kvbus.core.wire.frames import REBUILDS
from kvbus.transport.curve import Curve
from kvbus.transport.grants import Clients

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

KEEPALIVE: Final[dict[int, int]] = {
    # TCP keepalive detects a peer that vanished without closing its connection. After 30 s without a byte the
    # kernel probes the peer every 10 s, and closes the connection after three unanswered probes. TCP does not probe
    # while it waits for an acknowledgement of sent data. Then the connection closes when the kernel stops sending
    # the data again, which takes a quarter of an hour (net.ipv4.tcp_retries2).
    #
    # kvbus sends no ZMTP heartbeats on any socket. go-zeromq (in llm-d and its simulated engine) passes a PING to
    # its application like a message, and never answers it. So heartbeats would disconnect healthy routers and idle
    # engines, and corrupt replay answers.
    #
    # kvbus does not set TCP_USER_TIMEOUT (TCP_MAXRT), because it also closes the connection of a healthy peer that
    # stops reading for a while.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_COMMON: Final[dict[int, int]] = {
    **KEEPALIVE,
    zmq.LINGER: 0,  # closing a socket never blocks, and drops messages that are not sent yet
    zmq.IPV6: 1,  # accept IPv6 and IPv4 if the host supports both
    zmq.HANDSHAKE_IVL: 3_000,  # ms until a peer without a handshake is disconnected; a refused peer may then try again
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2_000,  # ms, so that kvbus reconnects to a restarted engine within two seconds
}

OPTIONS: Final[dict[int, dict[int, int]]] = {
    # A SUB only receives, so TCP keepalive detects a vanished publisher after 60 s.
    zmq.SUB: {**_COMMON},
    # A receive queue without limit: if kvbus's queue were full, the queue of an engine's ROUTER would fill up, and then
    # the ROUTER would silently drop messages of the answer.
    zmq.DEALER: {**_COMMON, zmq.RCVHWM: 0},
    # With MANDATORY, a send to a full or vanished requester fails. Without it, the ROUTER would silently drop the
    # message.
    zmq.ROUTER: {**_COMMON, zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: 1_000},
}


IO_THREADS: Final = 2
"""Number of I/O threads of the daemon's ZeroMQ context.

The first thread serves numeric addresses. The second one serves host names, because looking one up may block the
thread.
"""

OLDEST: Final = (4, 3, 5)
"""Oldest libzmq version that kvbus accepts.

Earlier versions have known security holes, which a peer can exploit before it has shown its CURVE key.
"""

MAX_PORT: Final = 65535

_PEER: Final = re.compile(r"tcp://(?=[A-Za-z0-9\[:])[\w.:%;\[\]*-]*:\d+|ipc://.{1,107}|inproc://.+", re.ASCII)
"""Matches the endpoints to which libzmq can connect, by libzmq's own syntax."""


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """The rules for the peers of a socket: who may connect, and how large a frame may be.

    Attributes:
        max_frame_bytes: maximum bytes of a frame. A larger frame closes the connection. -1 for no limit.
        curve: kvbus's keys and the allow-list; None for a socket without CURVE.
        views: numbers of the views by public key. A view is the part of the events that the key's owner may read.
            Owners without a view read every event.
        hidden: numbers of the views that may not read a stream, by the stream's slot.
    """

    max_frame_bytes: int = -1
    curve: Curve | None = None
    views: Mapping[bytes, int] = field(default_factory=dict)
    hidden: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def clients(self, stream: int) -> Clients:
        """Return the clients that may read one stream, by public key. The result is empty without CURVE.

        Args:
            stream: slot of the stream.
        """
        if self.curve is None:
            return {}
        hidden = self.hidden.get(stream)
        if not hidden:
            return self.curve.clients
        return {key: client for key, client in self.curve.clients.items() if self.views.get(key) not in hidden}

    def at(self, stream: int) -> PeerPolicy:
        """Return the policy for one stream. Its allow-list has only the clients that may read this stream.

        Args:
            stream: slot of the stream.
        """
        return self if self.curve is None else replace(self, curve=replace(self.curve, clients=self.clients(stream)))

    def put_on(self, socket: Socket) -> None:
        """Set the maximum frame size and the CURVE keys on a libzmq socket. Call this before bind or connect."""
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_frame_bytes)
        if self.curve is not None:
            self.curve.as_client(socket)


PLAIN: Final = PeerPolicy()


def rebuilding_id() -> bytes:
    """Return a random routing id for a DEALER of kvbus that requests replays.

    The id's prefix tells a kvbus at the other end that the requester gets no state on a subscription. So its replay
    must contain the state.
    """
    return REBUILDS + os.urandom(8)


def check_library() -> None:
    """Check that the installed libzmq is new enough.

    Raises:
        UnsupportedError: libzmq is older than :data:`OLDEST`.
    """
    if zmq.zmq_version_info() < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedError(
            f"libzmq {zmq.zmq_version()} is too old: {oldest} or newer is needed (pyzmq 26 includes it)"
        )


def make_context() -> Context:
    """Return the daemon's ZeroMQ context."""
    context = Context(IO_THREADS)
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))  # the default is 1,023; a source needs several sockets
    return context


def make_socket(context: Context, kind: int, **more: int) -> Socket:
    """Return a socket with the options that :data:`OPTIONS` has for its type.

    Args:
        context: the ZeroMQ context.
        kind: the socket's type, such as ``zmq.SUB``.
        more: options by name that replace those of the table, such as ``SNDHWM=10``.
    """
    socket = context.socket(kind)
    for option, value in OPTIONS[kind].items():
        socket.setsockopt(option, value)
    for name, value in more.items():
        socket.setsockopt(getattr(zmq, name), value)
    return socket


def attach(socket: Socket, endpoint: str) -> None:
    """Connect a socket of the daemon.

    Raises:
        BindError: the endpoint is malformed.
    """
    try:
        _join(socket, endpoint, bind=False)
    except zmq.ZMQError as error:
        raise BindError(endpoint, zmq.strerror(error.errno or 0), verb="connect to") from error


def attach_or_refuse(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Bind or connect a socket of the client library. For a malformed endpoint, raise a ValueError.

    Raises:
        BindError: the endpoint is in use, or not an address of this machine.
        ValueError: the endpoint is malformed.
    """
    check_port(endpoint)
    try:
        _join(socket, endpoint, bind=bind)
    except zmq.ZMQError as error:
        raise refused(error, endpoint, bind=bind) from error


def check_port(endpoint: str) -> None:
    """Check that the port of a TCP endpoint is at most 65535.

    libzmq accepts a larger port, and silently uses only its lowest 16 bits: 14464 in place of 80000.

    Raises:
        ValueError: the port is above 65535.
    """
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > MAX_PORT:
        raise ValueError(f"{endpoint}: the port must be at most {MAX_PORT}")


def check_peer(endpoint: str) -> None:
    """Check that libzmq could connect to an endpoint, without making a connection.

    A trial connection would end at once, and a kvbus at the endpoint would count it as a router that disconnects.

    Raises:
        ValueError: the endpoint is malformed.
    """
    check_port(endpoint)
    if not _PEER.fullmatch(endpoint):
        raise ValueError(f"cannot connect to {endpoint}: must be tcp://host:port or ipc://path")


def refused(error: zmq.ZMQError, endpoint: str, *, bind: bool) -> Exception:
    """Return the exception for libzmq's error at bind or connect.

    It is a ValueError if the endpoint is malformed, and a BindError otherwise. An error at connect always means that
    the endpoint is malformed.
    """
    reason = zmq.strerror(error.errno or 0)
    if not bind or error.errno in (zmq.EPROTONOSUPPORT, errno.EINVAL, zmq.ENOCOMPATPROTO):
        return ValueError(f"cannot {'bind' if bind else 'connect to'} {endpoint}: {reason}")
    return BindError(endpoint, reason)


def _join(socket: Socket, endpoint: str, *, bind: bool) -> None:
    _choose_thread(socket, endpoint, bind=bind)
    if bind:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)


def bound_endpoint(socket: Socket, endpoint: str) -> str:
    """Return the endpoint that a socket is bound to, with its real port.

    libzmq reports the IPv4 address of an IPv6 socket in the form ``[::ffff:10.0.0.7]``. Peers without IPv6 cannot
    connect to this form, so the function returns the plain IPv4 address.
    """
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") or endpoint
    return re.sub(r"\[::ffff:([\d.]+)\]", r"\1", bound)


def _choose_thread(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Assign a socket to one of libzmq's two I/O threads.

    The second thread gets the sockets that connect to a host name, and the first thread gets all other sockets. On
    every connect, libzmq looks up the name in the I/O thread, which waits for the answer. A name server that does not
    answer would block all other sockets of the same thread.
    """
    if socket.context.get(zmq.IO_THREADS) != IO_THREADS:
        return
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    named = not bind and endpoint.startswith("tcp://") and not _is_address(host.partition("%")[0])
    socket.setsockopt(zmq.AFFINITY, 2 if named else 1)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def attach_again(socket: Socket, endpoint: str) -> None:
    """Connect a socket again to an endpoint that libzmq has abandoned."""
    with contextlib.suppress(zmq.ZMQError):  # libzmq may have removed the endpoint already
        socket.disconnect(endpoint)
    socket.connect(endpoint)


TERM_S: Final = 1.0


def end(context: Context) -> bool:
    """Close all sockets of a context and end the context. Return False if that takes more than :data:`TERM_S` seconds.

    About once in several hundred calls, libzmq 4.3.5 waits for ever for the pipe of a ROUTER whose peer disconnected
    during an answer. No data is lost then, and the waiting thread ends with the process.
    """
    waiter = threading.Thread(target=context.destroy, name="kvbus-zmq-term", daemon=True)
    waiter.start()
    waiter.join(TERM_S)
    return not waiter.is_alive()
