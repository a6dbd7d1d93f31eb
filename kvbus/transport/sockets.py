"""All socket options that kvbus sets, in one table, with their reasons."""

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
    # TCP keepalive finds a peer that is gone without a FIN: after 30 s without a byte the kernel probes it every 10 s,
    # and closes the connection after three probes without an answer. While sent data is not acknowledged, TCP does not
    # probe: the connection closes when the kernel stops sending again (net.ipv4.tcp_retries2, a quarter of an hour).
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
    zmq.LINGER: 0,  # closing never blocks; flush before it what must leave
    zmq.IPV6: 1,  # dual stack where the host has it
    zmq.HANDSHAKE_IVL: 3_000,  # a silent peer holds no connection for longer, and a refused one may try again
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2_000,  # kvbus finds a restarted engine again within two seconds
}

OPTIONS: Final[dict[int, dict[int, int]]] = {
    # Engines publish in bursts, and kvbus must never slow them: this queue takes the burst, and kvbus drains it at
    # once. The socket only receives, so keepalive notices a vanished engine after 60 s; a replay fills the gap.
    zmq.SUB: {**_COMMON, zmq.RCVHWM: 200_000},
    # an engine's ROUTER drops silently at its own high-water mark: it must never fill up because of us
    zmq.DEALER: {**_COMMON, zmq.RCVHWM: 0},
    # MANDATORY: a full or vanished requester gives an error instead of a lost frame
    zmq.ROUTER: {**_COMMON, zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: 1_000},
}


IO_THREADS: Final = 2
"""I/O threads of the daemon's context: one for peers with an address, one for peers whose name needs a look-up."""

OLDEST: Final = (4, 3, 5)
"""Oldest accepted libzmq: earlier ones have known security holes that a peer can use before it shows a key."""

MAX_PORT: Final = 65535

_PEER: Final = re.compile(r"tcp://(?=[A-Za-z0-9\[:])[\w.:%;\[\]*-]*:\d+|ipc://.{1,107}|inproc://.+", re.ASCII)
"""What libzmq connects to, by its own rule."""


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """Who may be a socket's peer, and what it may send.

    Attributes:
        max_frame_bytes: a larger frame closes the connection; -1 for no limit.
        curve: keys; None for a socket without CURVE.
        views: by public key, the number of the view that its owner reads; whoever is not there reads everything.
        hidden: by stream, the views that see nothing of it.
    """

    max_frame_bytes: int = -1
    curve: Curve | None = None
    views: Mapping[bytes, int] = field(default_factory=dict)
    hidden: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def clients(self, stream: int) -> Clients:
        """Return who may connect to one stream."""
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
        """Set the socket's options. Call it before any bind or connect."""
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_frame_bytes)
        if self.curve is not None:
            self.curve.as_client(socket)


PLAIN: Final = PeerPolicy()


def rebuilding_id() -> bytes:
    """Return a routing id for a DEALER that asks for a replay and has no state by a subscription."""
    return REBUILDS + os.urandom(8)


def check_library() -> None:
    """Check the version of libzmq.

    Raises:
        UnsupportedError: it has known security holes.
    """
    if zmq.zmq_version_info() < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedError(
            f"libzmq {zmq.zmq_version()} is too old: {oldest} or newer is needed (pyzmq 26 brings it)"
        )


def make_context() -> Context:
    """Make the daemon's context. Its I/O threads do not preempt the relay's thread.

    A sidecar has few cores, so the threads may share one. There, Linux runs a thread that just woke up first, and a
    burst of batches costs two context switches per batch. A ``SCHED_BATCH`` thread does not preempt: the burst leaves
    at its end, with one switch. With enough cores nothing changes.
    """
    context = Context(IO_THREADS)
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))  # else 1,023, and a source takes several
    if _may_batch():
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


def _may_batch() -> bool:
    """Check in a short-lived thread whether SCHED_BATCH is allowed: in sandboxes it is not, and libzmq would abort."""
    allowed = []

    def ask() -> None:
        with contextlib.suppress(OSError, AttributeError):  # not every system is Linux
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            allowed.append(True)

    thread = threading.Thread(target=ask, name="kvbus-policy")
    thread.start()
    thread.join()
    return bool(allowed)


def make_socket(context: Context, kind: int, **more: int) -> Socket:
    """Make a socket with the options of its type; ``more`` overrides by option name, such as ``SNDHWM=10``."""
    socket = context.socket(kind)
    for option, value in OPTIONS[kind].items():
        socket.setsockopt(option, value)
    for name, value in more.items():
        socket.setsockopt(getattr(zmq, name), value)
    return socket


def attach(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Bind or connect.

    Raises:
        BindError: the endpoint is taken, malformed, or no address of this machine.
    """
    try:
        _join(socket, endpoint, bind=bind)
    except zmq.ZMQError as error:
        raise BindError(endpoint, zmq.strerror(error.errno or 0), verb="listen on" if bind else "connect to") from error


def attach_or_refuse(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Bind or connect, for callers of the library, to whom a malformed endpoint is a wrong argument.

    Raises:
        BindError: the endpoint is taken, or no address of this machine.
        ValueError: the endpoint is malformed.
    """
    check_port(endpoint)
    try:
        _join(socket, endpoint, bind=bind)
    except zmq.ZMQError as error:
        raise refused(error, endpoint, bind=bind) from error


def check_port(endpoint: str) -> None:
    """Refuse a port that there is none of. libzmq takes its lowest 16 bits: 80000 would be 14464.

    Raises:
        ValueError: the port is above 65535.
    """
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > MAX_PORT:
        raise ValueError(f"{endpoint}: the port must be at most {MAX_PORT}")


def check_peer(endpoint: str) -> None:
    """Refuse an endpoint that libzmq would not connect to, and make no connection: a bus counts one that ends at once.

    Raises:
        ValueError: it is malformed.
    """
    check_port(endpoint)
    if not _PEER.fullmatch(endpoint):
        raise ValueError(f"cannot connect to {endpoint}: must be tcp://host:port or ipc://path")


def refused(error: zmq.ZMQError, endpoint: str, *, bind: bool) -> Exception:
    """Say why ZeroMQ refused an endpoint: it is malformed (ValueError), or cannot be bound (BindError)."""
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
    """Return the endpoint a socket is bound to, with its real port.

    A dual-stack socket names an IPv4 address as an IPv6 one, which peers without IPv6 cannot connect to.
    """
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") or endpoint
    return re.sub(r"\[::ffff:([\d.]+)\]", r"\1", bound)


def _choose_thread(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Give connections by host name to the second I/O thread.

    libzmq looks up the name in the thread that connects, each time it connects, and blocks until the answer. A name
    server that does not answer would hold up all other sockets of that thread.
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
    """Connect again where libzmq has abandoned an endpoint."""
    with contextlib.suppress(zmq.ZMQError):  # libzmq may have forgotten the endpoint already
        socket.disconnect(endpoint)
    socket.connect(endpoint)


TERM_S: Final = 1.0


def end(context: Context) -> bool:
    """Terminate a context and close its sockets; return False if libzmq has not finished after :data:`TERM_S` seconds.

    Once in some hundred times libzmq 4.3.5 waits for ever for the pipe of a ROUTER whose peer left in the middle of an
    answer. Nothing is lost then; the waiting thread ends with the process.
    """
    waiter = threading.Thread(target=context.destroy, name="kvbus-zmq-term", daemon=True)
    waiter.start()
    waiter.join(TERM_S)
    return not waiter.is_alive()
