"""Every socket option kvbus sets, in one table, with its reason."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import zmq

from kvbus.errors import BindError, UnsupportedError
from kvbus.transport.curve import Curve

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

KEEPALIVE: Final[dict[int, int]] = {
    # A peer that is gone without a FIN: after 30 s without a byte its kernel is asked, every 10 s, and after three
    # questions without an answer the connection is over. While something sent is not acknowledged TCP does not ask:
    # it is over when the kernel gives up sending (net.ipv4.tcp_retries2, a quarter of an hour).
    # Not by ZMTP heartbeats, on any socket: go-zeromq (llm-d, its simulated engine) hands a PING to its application
    # like a message and answers nothing. Routers and quiet engines that live would be cut off, answers broken.
    # Not by TCP_USER_TIMEOUT (TCP_MAXRT): it also ends the connection of a live peer that does not read for a while.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_COMMON: Final[dict[int, int]] = {
    **KEEPALIVE,
    zmq.LINGER: 0,  # closing never blocks; what must leave is flushed before
    zmq.IPV6: 1,  # dual stack where the host has it
    zmq.HANDSHAKE_IVL: 3_000,  # who says nothing holds no connection for longer, and who was refused may try again
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2_000,  # an engine that restarts is found again within two seconds
}

OPTIONS: Final[dict[int, dict[int, int]]] = {
    # engines publish in bursts and must never be slowed: the queue is here, and drained at once;
    # it only receives, so an engine that vanished is noticed after 60 s, and its replay is asked for what is missing
    zmq.SUB: {**_COMMON, zmq.RCVHWM: 200_000},
    # an engine's ROUTER drops at its own high-water mark in silence: never let it fill up because of us
    zmq.DEALER: {**_COMMON, zmq.RCVHWM: 0},
    # NODROP: a full router shows as EAGAIN, and only then one batch is sent the lossy way and counted;
    # VERBOSER: every subscription is seen, which is how subscribers are counted
    zmq.XPUB: {**_COMMON, zmq.XPUB_NODROP: 1, zmq.XPUB_VERBOSER: 1},
    # MANDATORY: a full or vanished requester shows as an error instead of a lost frame
    zmq.ROUTER: {**_COMMON, zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: 1_000},
}


IO_THREADS: Final = 2
"""Of the daemon's context: one for everything, one for peers whose names have to be looked up."""

OLDEST: Final = (4, 3, 5)
"""libzmq before it has known holes in what peers can reach before they have shown a key."""


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """What is taken from peers, and from whom.

    Attributes:
        max_frame_bytes: a larger frame costs the connection; -1 for no limit.
        curve: keys; None for a plain socket.
        domain: under which the ZAP handler knows who may dial in.
    """

    max_frame_bytes: int = -1
    curve: Curve | None = None
    domain: str = ""

    def put_on(self, socket: Socket, *, bind: bool) -> None:
        """Set the options; before any bind or connect."""
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_frame_bytes)
        if self.curve is not None:
            if bind:
                self.curve.as_server(socket, self.domain)
            else:
                self.curve.as_client(socket)


PLAIN: Final = PeerPolicy()


def check_library() -> None:
    """Look at the libzmq this process runs on.

    Raises:
        UnsupportedError: it is too old to be exposed to peers.
    """
    if zmq.zmq_version_info() < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedError(
            f"libzmq {zmq.zmq_version()} is too old: {oldest} or newer is needed (pyzmq 26 brings it)"
        )


def make_context() -> Context:
    """The daemon's context: its I/O threads never interrupt who works on what they brought.

    Where they share a core with the relay's thread (a sidecar has few), Linux lets a thread that was just woken go
    first, and a burst of batches is sent with two changes of thread for each. ``SCHED_BATCH`` is without that
    privilege: a burst leaves at its end, with one. On a core of their own nothing changes.
    """
    context = Context(IO_THREADS)
    if _may_batch():
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


def _may_batch() -> bool:
    """Libzmq aborts where the policy is refused (sandboxes), so a thread that ends here asks first."""
    allowed = []

    def ask() -> None:
        with contextlib.suppress(OSError, AttributeError):  # not everywhere is Linux
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            allowed.append(True)

    thread = threading.Thread(target=ask, name="kvbus-policy")
    thread.start()
    thread.join()
    return bool(allowed)


def set_options(socket: Socket, options: Mapping[int, int]) -> None:
    """Set them, before any bind or connect."""
    for option, value in options.items():
        socket.setsockopt(option, value)


def make_socket(context: Context, kind: int, **more: int) -> Socket:
    """A socket with its table's options; ``more`` overrides by option name, such as ``SNDHWM=10``."""
    socket = context.socket(kind)
    set_options(socket, OPTIONS[kind])
    for name, value in more.items():
        socket.setsockopt(getattr(zmq, name), value)
    return socket


def attach(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Bind or connect.

    Raises:
        BindError: the endpoint is taken, not ours to bind, or no endpoint.
    """
    try:
        _choose_thread(socket, endpoint, bind=bind)
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise BindError(endpoint, error.strerror or str(error), verb="listen on" if bind else "connect to") from error


def _choose_thread(socket: Socket, endpoint: str, *, bind: bool) -> None:
    """Keep host names to the second I/O thread.

    libzmq looks a name up in the thread that connects, each time it connects, and waits for the answer. A name server
    that does not answer would hold up everything else that thread carries.
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
    """Connect anew where libzmq has given an endpoint up."""
    with contextlib.suppress(zmq.ZMQError):  # it may have forgotten the endpoint already
        socket.disconnect(endpoint)
    socket.connect(endpoint)


TERM_S: Final = 1.0


def end(context: Context) -> bool:
    """Terminate a context, closing what is open; False if libzmq has not come to an end after :data:`TERM_S` seconds.

    libzmq 4.3.5 now and then waits for ever for the pipe of a ROUTER whose peer left in the middle of an answer (once
    in some hundred times). Nothing is lost by leaving it; the thread that waits ends with the process.
    """
    waiter = threading.Thread(target=context.destroy, name="kvbus-zmq-term", daemon=True)
    waiter.start()
    waiter.join(TERM_S)
    return not waiter.is_alive()
