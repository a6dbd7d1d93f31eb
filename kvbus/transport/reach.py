"""Connect to an endpoint once, without libzmq, and report which step failed: host name, address or connection.

libzmq tries again for ever and reports no reason. ``kvbus doctor``, the client library and a daemon that waits for an
engine use this module to find the reason. :mod:`kvbus.transport.dialling` continues with the ZMTP handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import inf
from typing import Final

from kvbus.common.look_ups import in_daemon_thread
from kvbus.common.tasks import end_tasks
from kvbus.core.findings import engine as catalogue
from kvbus.core.findings.finding import Finding
from kvbus.transport.zmtp.addresses import ipc_address, split_tcp

PUBLISHERS: Final = frozenset({"PUB", "XPUB"})
SUBSCRIBERS: Final = frozenset({"SUB", "XSUB"})


class Stop(StrEnum):
    """The step at which a dial ended. The members are in the order of the steps."""

    NAME = "name"
    """The host name does not resolve."""
    REFUSED = "refused"
    """Nothing listens at the address."""
    NO_ROUTE = "no_route"
    """The network has no route to the address, or forbids the connection."""
    DROPPED = "dropped"
    """The connection attempt gets no answer: a firewall drops it, or no machine has the address."""
    OTHER_ADDRESS = "other_address"
    """Nothing listens at the address that libzmq uses for the host name, but a port at another address of this name
    is open.
    """
    SILENT = "silent"
    """The port accepts the connection, but the peer sends nothing."""
    STRANGER = "stranger"
    """The server at the port does not speak ZMTP, but another protocol."""
    VERSION = "version"
    """The peer speaks a ZMTP version that kvbus does not support."""
    MECHANISM = "mechanism"
    """Only one of the two sides uses CURVE."""
    KEYS = "keys"
    """Both sides use CURVE, but their keys do not match."""
    NO_CURVE = "no_curve"
    """Both sides use CURVE, but PyNaCl is not installed, so kvbus cannot check the keys."""
    CLOSED = "closed"
    """The peer closed the connection during the handshake."""
    OPEN = "open"
    """The ZMTP handshake has succeeded."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of dialling an endpoint once.

    Attributes:
        endpoint: the endpoint that was dialled.
        stop: the step at which the dial ended.
        detail: details of the failure, which :attr:`sentence` shows in parentheses.
        addresses: the addresses that the host name resolves to. The first one is the address that ZeroMQ uses.
        mechanism: the peer's security mechanism; empty if the peer did not name it.
        socket_type: the peer's socket type; empty if the peer did not name it.
        version: the peer's ZMTP version, major and minor.
    """

    endpoint: str
    stop: Stop
    detail: str = ""
    addresses: tuple[str, ...] = ()
    mechanism: str = ""
    socket_type: str = ""
    version: tuple[int, int] = (0, 0)

    @property
    def sentence(self) -> str:
        """The reason for the failure of the dial as text for the operator, or a statement that the endpoint is open."""
        return f"{self.endpoint} is open" if self.stop is Stop.OPEN else self.finding().text

    def finding(self, at: str = "", name: str = "endpoint") -> Finding:
        """Return the finding about the failed dial, which tells the operator the reason and what to do.

        Args:
            at: the configuration section that has the endpoint.
            name: the endpoint's key in this section.
        """
        detail = f" ({self.detail})" if self.detail else ""
        return FAILED[self.stop](at=at, name=name, endpoint=self.endpoint, detail=detail)

    def no_publisher(self, at: str = "") -> Finding | None:
        """Return the finding that explains why no engine publishes at the endpoint; None if an engine does.

        Args:
            at: the configuration section that has the endpoint.
        """
        if self.stop is not Stop.OPEN:
            return self.finding(at)
        if self.socket_type in PUBLISHERS:
            return None
        kind = catalogue.ENDPOINT_IS_OTHER
        if self.socket_type in SUBSCRIBERS:
            kind = catalogue.ENDPOINT_IS_SUBSCRIBER
        elif self.socket_type == "ROUTER":
            kind = catalogue.ENDPOINT_IS_REPLAY
        return kind(at=at, endpoint=self.endpoint, type=self.socket_type)


FAILED: Final = {
    Stop.NAME: catalogue.HOST_UNKNOWN,
    Stop.REFUSED: catalogue.NOTHING_LISTENS,
    Stop.NO_ROUTE: catalogue.NO_ROUTE,
    Stop.DROPPED: catalogue.NO_ANSWER,
    Stop.OTHER_ADDRESS: catalogue.OTHER_ADDRESS,
    Stop.SILENT: catalogue.SILENT_PORT,
    Stop.STRANGER: catalogue.NOT_ZEROMQ,
    Stop.VERSION: catalogue.ZMTP_TOO_OLD,
    Stop.MECHANISM: catalogue.CURVE_ONE_SIDE,
    Stop.KEYS: catalogue.CURVE_KEYS_DIFFER,
    Stop.NO_CURVE: catalogue.CURVE_NOT_INSTALLED,
    Stop.CLOSED: catalogue.HANDSHAKE_CLOSED,
}


Address = tuple[int, str | tuple[str, int]]
"""An address family, and an address in the form that ``socket.connect`` accepts for this family."""


@dataclass(frozen=True, slots=True)
class Found:
    """The addresses that an endpoint resolves to. libzmq uses only ``first``."""

    first: Address
    others: tuple[Address, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All addresses of the endpoint, as text for the operator."""
        return tuple(shown(each) for each in (self.first, *self.others))


def shown(address: Address) -> str:
    """Return an address as text for the operator: the host without the port, or the path of a Unix socket."""
    where = address[1]
    return where.replace("\0", "@", 1) if isinstance(where, str) else where[0]


async def find(endpoint: str) -> Found:
    """Return the addresses that an endpoint resolves to.

    Raises:
        OSError: the host name does not resolve.
        ValueError: the endpoint is malformed.
    """
    path = ipc_address(endpoint)
    if path is not None:
        return Found((socket.AF_UNIX, path))
    host, port = split_tcp(endpoint)
    return await in_daemon_thread(partial(_look_up, host, port))


def _look_up(host: str, port: int) -> Found:
    each = [
        (family, (address[0], port))
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if isinstance(address[0], str)
    ]
    # libzmq with ZMQ_IPV6 looks up IPv6 addresses, and IPv4 addresses only if there are none. It tries only the first
    # address that it finds.
    mapped = socket.getaddrinfo(host, port, family=socket.AF_INET6, type=socket.SOCK_STREAM, flags=socket.AI_V4MAPPED)[
        0
    ][4][0]
    wanted = str(mapped).removeprefix("::ffff:")
    first = next((one for one in each if one[1][0] == wanted), each[0])
    others = dict.fromkeys(one for one in each if one != first)
    return Found(first, tuple(others))


class Attempt:
    """One attempt to connect to an endpoint.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        seconds: the time limit, which :attr:`outcome` names.
        every: whether to try every address of the host name, as kvbus's own ZMTP does. libzmq tries only the first.

    Attributes:
        outcome: the outcome if the attempt ended now, for example by a timeout. Once connected, it is ``SILENT``,
            because the peer has sent nothing.
        address: the address that kvbus has tried first, or is connected to; None before that.
    """

    def __init__(self, endpoint: str, seconds: float, *, every: bool = False) -> None:
        self.outcome = Outcome(endpoint, Stop.NAME, f"no name server answers within {seconds:g} s")
        self.address: Address | None = None
        self._seconds = seconds
        self._every = every

    async def run(self) -> socket.socket | None:
        """Connect to the endpoint and return the socket; None if a step failed. :attr:`outcome` then has the reason."""
        endpoint = self.outcome.endpoint
        try:
            found = await find(endpoint)
        except OSError as error:
            self.outcome = Outcome(endpoint, Stop.NAME, (error.strerror or str(error)).lower())
            return None
        self.outcome = Outcome(endpoint, Stop.DROPPED, f"within {self._seconds:g} s", found.names)
        connected = await self._connect(found)
        if isinstance(connected, tuple):
            stop, detail = connected
            self.outcome = replace(self.outcome, stop=stop, detail=detail)
            return None
        self.outcome = Outcome(endpoint, Stop.SILENT, "", found.names)
        return connected

    async def _connect(self, found: Found) -> socket.socket | tuple[Stop, str]:
        self.address = found.first
        first = await _try(found.first)
        if isinstance(first, socket.socket) or not found.others:
            return first
        tries = await asyncio.gather(*map(_try, found.others))
        pairs = zip(found.others, tries, strict=True)
        answers = [(each, one) for each, one in pairs if isinstance(one, socket.socket)]
        if self._every and answers:
            self.address, connected = answers.pop(0)
            for _, one in answers:
                one.close()
            return connected
        for _, one in answers:
            one.close()
        return (Stop.OTHER_ADDRESS, f"{shown(found.first)}; {shown(answers[0][0])} accepts") if answers else first


async def connectable(endpoint: str, *, seconds: float) -> Outcome:
    """Connect to an endpoint once, and close the connection. If this succeeds, the outcome is `Stop.SILENT`.

    kvbus does not wait for the peer's first bytes, so the outcome is never `Stop.OPEN`.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        seconds: maximum seconds for the connection.
    """
    attempt = Attempt(endpoint, seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            connected = await attempt.run()
            if connected is not None:
                connected.close()
    return attempt.outcome


async def _try(address: Address) -> socket.socket | tuple[Stop, str]:
    try:
        connecting = socket.socket(address[0], socket.SOCK_STREAM)
    except OSError as error:
        return Stop.NO_ROUTE, error.strerror or str(error)
    connecting.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connecting, address[1])
    except OSError as error:
        connecting.close()
        # uvloop sets no errno on some errors
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in {errno.ECONNREFUSED, errno.ENOENT}:
            return Stop.REFUSED, reason.lower()
        return (Stop.DROPPED if error.errno == errno.ETIMEDOUT else Stop.NO_ROUTE), reason.lower()
    except BaseException:
        connecting.close()
        raise
    if address[0] != socket.AF_UNIX and connecting.getsockname()[:2] == connecting.getpeername()[:2]:
        # Both ends have the same address: if nothing listens at a local port, TCP may connect the port to itself.
        connecting.close()
        return Stop.REFUSED, "connection refused"
    return connecting


LONGEST_PAUSE: Final = 60.0
"""Maximum seconds between two attempts to find the reason for a missing connection."""


class MissingConnection:
    """The schedule for finding the reason for a missing connection: first after some seconds, then after longer pauses.

    The attempts are repeated, because the reason may change: at first the host name may be unknown, and later nothing
    may listen at the port.

    Args:
        after: seconds without a connection before the first attempt.
        find: finds and reports the reason. Its argument is True for the first attempt.
    """

    def __init__(self, after: float, find: Callable[[bool], Coroutine[None, None, None]]) -> None:
        self._after = self._pause = after
        self._find = find
        self._looking: asyncio.Task[None] | None = None
        self.deadline = inf
        """Time of the next attempt of :meth:`look` to find the reason; infinite while the connection is up."""

    def missing(self, now: float) -> None:
        """Record that the connection is missing since ``now``, and schedule the first attempt to find the reason."""
        self._pause = self._after
        self.deadline = now + self._pause

    def connected(self) -> None:
        """Record that the connection is up, and cancel a running attempt to find out why it was missing."""
        self.deadline = inf
        if self._looking is not None:
            self._looking.cancel()

    def look(self, now: float) -> None:
        """Start an attempt to find out why the connection is missing.

        Do nothing before the time of the next attempt (:attr:`deadline`), or while an attempt is running.
        """
        if now < self.deadline or (self._looking is not None and not self._looking.done()):
            return
        first = self._pause == self._after
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        self.deadline = now + self._pause
        self._looking = asyncio.get_running_loop().create_task(self._find(first))

    async def aclose(self) -> None:
        """Start no further attempts, cancel a running attempt, and wait for its end."""
        self.deadline = inf
        await end_tasks([self._looking])
