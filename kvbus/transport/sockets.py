"""All options that kvbus sets on libzmq sockets, in one table, with their reasons."""

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
    # TCP keepalive detects a peer that vanished without a FIN: after 30 s without a byte the kernel probes the peer
    # every 10 s, and closes the connection after three unanswered probes. TCP does not probe while sent data is not
    # acknowledged: then the connection closes when the kernel gives up the retransmissions (net.ipv4.tcp_retries2,
    # a quarter of an hour).
    # No ZMTP heartbeats, on any socket: go-zeromq (llm-d, its simulated engine) hands a PING to its application like a
    # message, and never answers it. Heartbeats would disconnect healthy routers and idle engines, and break answers.
    # No TCP_USER_TIMEOUT (TCP_MAXRT): it also closes the connection of a healthy peer that stops reading for a while.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_COMMON: Final[dict[int, int]] = {
    **KEEPALIVE,
    zmq.LINGER: 0,  # closing never blocks; flush important messages before
    zmq.IPV6: 1,  # dual stack if the host supports it
    zmq.HANDSHAKE_IVL: 3_000,  # ms until a silent peer is disconnected; a refused peer may then try again
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2_000,  # kvbus reconnects to a restarted engine within two seconds
}

OPTIONS: Final[dict[int, dict[int, int]]] = {
    # Engines publish in bursts, and kvbus must never slow an engine. So this queue holds a complete burst, and kvbus
    # drains it at once. The socket only receives, so keepalive detects a vanished engine after 60 s. A replay then
    # fills the gap.
    zmq.SUB: {**_COMMON, zmq.RCVHWM: 200_000},
    # no limit: an engine's ROUTER silently drops messages at its high-water mark, so kvbus must never fill its queue
    zmq.DEALER: {**_COMMON, zmq.RCVHWM: 0},
    # MANDATORY: a send to a full or vanished requester fails instead of losing a frame silently
    zmq.ROUTER: {**_COMMON, zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: 1_000},
}


IO_THREADS: Final = 2
"""I/O threads of the daemon's context: one for numeric addresses, and one for host names, whose look-up may block."""

OLDEST: Final = (4, 3, 5)
"""Oldest accepted libzmq: earlier versions have known security holes that a peer can exploit before it shows a key."""

MAX_PORT: Final = 65535

_PEER: Final = re.compile(r"tcp://(?=[A-Za-z0-9\[:])[\w.:%;\[\]*-]*:\d+|ipc://.{1,107}|inproc://.+", re.ASCII)
"""The endpoints that libzmq accepts for a connection, by its own rule."""


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """The rules for the peers of a socket: who may connect, and how large a frame may be.

    Attributes:
        max_frame_bytes: maximum bytes of a frame; a larger frame closes the connection. -1 for no limit.
        curve: keys; None for a socket without CURVE.
        views: the number of the view that each key's owner reads, by public key. Other keys read everything.
        hidden: the views that may not read a stream, by the stream's slot.
    """

    max_frame_bytes: int = -1
    curve: Curve | None = None
    views: Mapping[bytes, int] = field(default_factory=dict)
    hidden: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def clients(self, stream: int) -> Clients:
        """Return the clients that may connect to one stream, by public key."""
        if self.curve is None:
            return {}
        hidden = self.hidden.get(stream)
        if not hidden:
            return self.curve.clients
        return {key: client for key, client in self.curve.clients.items() if self.views.get(key) not in hidden}

    def at(self, stream: int) -> PeerPolicy:
        """Return the policy for one stream."""
        return self if self.curve is None else replace(self, curve=replace(self.curve, clients=self.clients(stream)))

    def put_on(self, socket: Socket) -> None:
        """Set these rules on a libzmq socket. Call this before bind and connect."""
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_frame_bytes)
        if self.curve is not None:
            self.curve.as_client(socket)


PLAIN: Final = PeerPolicy()


def rebuilding_id() -> bytes:
    """Return a routing id for a DEALER that requests a replay without having got the state on a subscription."""
    return REBUILDS + os.urandom(8)


def check_library() -> None:
    """Check the version of libzmq.

    Raises:
        UnsupportedError: the version is older than :data:`OLDEST`.
    """
    if zmq.zmq_version_info() < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedError(
            f"libzmq {zmq.zmq_version()} is too old: {oldest} or newer is needed (pyzmq 26 brings it)"
        )


def make_context() -> Context:
    """Return the daemon's context, whose I/O threads do not preempt the relay's thread.

    A sidecar has few cores, so these threads may share one. On a shared core Linux first runs the thread that just woke
    up, and then a burst of batches costs two context switches per batch. A ``SCHED_BATCH`` thread does not preempt: the
    burst is sent at its end, with one switch. With enough cores the policy makes no difference.
    """
    context = Context(IO_THREADS)
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))  # the default is 1,023, and each source needs several
    if _may_batch():
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


def _may_batch() -> bool:
    """Try SCHED_BATCH in a short-lived thread; return whether it is allowed. If a sandbox forbids it, libzmq aborts."""
    allowed = []

    def ask() -> None:
        with contextlib.suppress(OSError, AttributeError):  # the function exists only on Linux
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            allowed.append(True)

    thread = threading.Thread(target=ask, name="kvbus-policy")
    thread.start()
    thread.join()
    return bool(allowed)


def make_socket(context: Context, kind: int, **more: int) -> Socket:
    """Return a socket with the options of its type. ``more`` overrides options by name, such as ``SNDHWM=10``."""
    socket = context.socket(kind)
    for option, value in OPTIONS[kind].items():
        socket.setsockopt(option, value)
    for name, value in more.items():
        socket.setsockopt(getattr(zmq, name), value)
    return socket


def attach(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Bind or connect a socket.

    Raises:
        BindError: the endpoint is in use, malformed, or not an address of this machine.
    """
    try:
        _join(socket, endpoint, bind=bind)
    except zmq.ZMQError as error:
        raise BindError(endpoint, zmq.strerror(error.errno or 0), verb="listen on" if bind else "connect to") from error


def attach_or_refuse(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Bind or connect a socket of the client library, for which a malformed endpoint is a ValueError.

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
    """Check the port of an endpoint. libzmq would silently use the lowest 16 bits: 14464 for 80000.

    Raises:
        ValueError: the port is above 65535.
    """
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > MAX_PORT:
        raise ValueError(f"{endpoint}: the port must be at most {MAX_PORT}")


def check_peer(endpoint: str) -> None:
    """Check that libzmq would connect to an endpoint, without a connection: a bus would count one that ends at once.

    Raises:
        ValueError: the endpoint is malformed.
    """
    check_port(endpoint)
    if not _PEER.fullmatch(endpoint):
        raise ValueError(f"cannot connect to {endpoint}: must be tcp://host:port or ipc://path")


def refused(error: zmq.ZMQError, endpoint: str, *, bind: bool) -> Exception:
    """Return the exception for an endpoint that ZeroMQ refused: ValueError if it is malformed, else BindError."""
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

    A dual-stack socket reports an IPv4 address as a mapped IPv6 address. Peers without IPv6 cannot connect to that, so
    this function returns the IPv4 address.
    """
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") or endpoint
    return re.sub(r"\[::ffff:([\d.]+)\]", r"\1", bound)


def _choose_thread(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Assign connections by host name to the second I/O thread.

    On every connect, libzmq looks up the name in the I/O thread and blocks until the answer. A name server that does
    not answer would block all other sockets of that thread.
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
    """Connect again after libzmq has abandoned an endpoint."""
    with contextlib.suppress(zmq.ZMQError):  # libzmq may have dropped the endpoint already
        socket.disconnect(endpoint)
    socket.connect(endpoint)


TERM_S: Final = 1.0


def end(context: Context) -> bool:
    """Terminate a context and close its sockets; return False if libzmq has not finished after :data:`TERM_S` seconds.

    About once in some hundred calls libzmq 4.3.5 waits for ever for the pipe of a ROUTER whose peer left during an
    answer. No data is lost then, and the waiting thread ends with the process.
    """
    waiter = threading.Thread(target=context.destroy, name="kvbus-zmq-term", daemon=True)
    waiter.start()
    waiter.join(TERM_S)
    return not waiter.is_alive()
