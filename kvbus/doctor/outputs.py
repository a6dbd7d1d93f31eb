"""What is wrong with an output: its ports, or (``bind: false``) the router that it dials."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import Final

from kvbus.config import Config, parse_endpoint, render_topic
from kvbus.config.endpoints import Address
from kvbus.core.wire.frames import ASKS_REPLAY, END_SEQ, FrameLimits, LiveMessage, parse_live, replay_request
from kvbus.core.wire.profiles import PROFILES
from kvbus.doctor.findings import Finding, Report, Seen
from kvbus.doctor.ports import holder
from kvbus.doctor.probes import NEWEST, local
from kvbus.doctor.sources import wrong
from kvbus.transport.curve import Curve
from kvbus.transport.reach.dialling import ClosedError, Connection, dial
from kvbus.transport.reach.outcome import Stop
from kvbus.transport.zmtp.limits import Limits
from kvbus.transport.zmtp.reasons import ProtocolError
from kvbus.transport.zmtp.roles import Role

SUBSCRIPTION_S: Final = 0.5
"""Seconds in which a router that was dialled says what it subscribes to."""


class OutputProber:
    """Looks at one output.

    Args:
        config: the configuration.
        index: the output's position.
        curve: the output's keys; None without.
        timeout: seconds for each endpoint; all are looked at at the same time.
        running: a bus with this configuration runs; None if nobody knows.
        topics: what each source publishes under, by slot, as far as it was heard.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        curve: Curve | None,
        *,
        timeout: float,
        running: bool | None,
        topics: dict[int, bytes],
    ) -> None:
        self._config = config
        self._output = config.outputs[index]
        self._at = f"outputs[{index}]"
        self._curve = curve
        self._timeout = timeout
        self._running = running
        self._topics = topics

    async def look(self) -> Report:
        """Look at every stream's endpoints."""
        report = Report()
        merged = self._output.layout == "merged"
        streams = self._config.streams()[: 1 if merged else None]
        looks = []
        for stream in streams:
            endpoints = self._output.stream_endpoints(0 if merged else stream.index)
            if self._output.bind:
                looks.append(self._port(endpoints.endpoint, "endpoint", "PUB"))
            else:
                looks.append(self._router(endpoints.endpoint, self._topic(stream.index)))
            if endpoints.replay_endpoint is not None:
                looks.append(self._port(endpoints.replay_endpoint, "replay_endpoint", "ROUTER"))
            if endpoints.snapshot_endpoint is not None:
                looks.append(self._port(endpoints.snapshot_endpoint, "snapshot_endpoint", "ROUTER"))
        texts = []
        for findings, text in await asyncio.gather(*looks):
            report.add(findings)
            texts.append(text)
        report.seen.append(Seen(self._at, self._output.name, "; ".join(filter(None, texts))))
        return report

    def _topic(self, slot: int) -> bytes | None:
        if PROFILES[self._output.profile].topics == "empty":
            return b""
        if self._output.topic is None:
            return self._topics.get(slot)
        stream = next(each for each in self._config.streams() if each.index == slot)
        return render_topic(self._output.topic, stream, self._config)

    async def _port(self, endpoint: str, name: str, kind: str) -> tuple[list[Finding], str]:
        address = parse_endpoint(endpoint)
        key = f"{self._at}.{name}"
        if (problem := _not_here(address)) and not self._running:
            do = 'name an address of this machine, or "*" for all of them'
            return [Finding(f"kvbus cannot listen on {endpoint}: {problem}", key, do)], ""
        role = Role.SUB if kind == "PUB" else Role.DEALER
        async with dial(local(endpoint), role, seconds=self._timeout, curve=self._as_client()) as dialled:
            outcome = dialled.outcome
            if outcome.stop is Stop.REFUSED:
                if self._running:
                    do = "the running bus has another configuration: restart it"
                    return [Finding(f"a bus runs, and nothing listens at {endpoint}", key, do)], ""
                return [], f"{endpoint} is free"
            if self._running is False or (outcome.stop is Stop.OPEN and outcome.socket_type != kind):
                who = holder(address.port) if not address.is_ipc else ""
                what = f"a {outcome.socket_type} socket" if outcome.socket_type else outcome.detail or "something else"
                do = "stop it, or choose another port"
                return [Finding(f"{endpoint} is in use by {who or what}", key, do)], ""
            if dialled.connection is None:
                if outcome.stop is Stop.KEYS or outcome.stop is Stop.MECHANISM:
                    # only routers have the keys to come in
                    return [], f"{endpoint} {outcome.mechanism}"
                return [wrong(outcome, self._at, name)], ""
            said = await self._listen(dialled.connection) if kind == "PUB" else await _ask(dialled.connection)
            if kind == "ROUTER" and not said and name == "replay_endpoint":
                return [Finding(f"the replay at {endpoint} does not answer", key, "look at kvbus's log")], ""
            return [], f"{endpoint} {outcome.socket_type}{said}"

    def _as_client(self) -> Curve | None:
        return None if self._output.bind else self._curve

    async def _listen(self, connection: Connection) -> str:
        """Listen for a batch as an ordinary subscriber does that wants no state."""
        with contextlib.suppress(TimeoutError, ClosedError, ProtocolError):
            async with asyncio.timeout(min(self._timeout, (self._output.heartbeat or 0.5) + 0.5)):
                await connection.send(b"\x01" + ASKS_REPLAY)
                await connection.send(b"\x01")
                message = parse_live(await connection.receive(), FrameLimits())
                if isinstance(message, LiveMessage):
                    return f" at seq {message.seq:,}"
        return ""

    async def _router(self, endpoint: str, topic: bytes | None) -> tuple[list[Finding], str]:
        key = f"{self._at}.endpoint"
        async with dial(endpoint, Role.PUB, seconds=self._timeout, curve=self._curve, limits=Limits()) as dialled:
            outcome = dialled.outcome
            if outcome.stop is Stop.REFUSED:
                do = "start the router, correct the port, or set bind: true if the router dials"
                cause = f"no router listens at {endpoint}: if it dials, both ends do"
                return [Finding(cause, f"{self._at}.bind", do)], ""
            if outcome.stop is not Stop.OPEN:
                return [wrong(outcome, self._at, "endpoint")], ""
            if outcome.socket_type not in {"SUB", "XSUB"}:
                do = "name the port that the router binds"
                return [Finding(f"{endpoint} is a {outcome.socket_type} socket and no subscriber", key, do)], ""
            wanted = await _subscriptions(dialled.connection) if dialled.connection is not None else []
        shown = ", ".join(repr(each.decode("utf-8", "replace")) for each in wanted)
        if wanted and topic is not None and not any(topic.startswith(each) for each in wanted):
            name = topic.decode("utf-8", "replace")
            cause = f"the router at {endpoint} subscribes to {shown}, and the stream's topic is {name!r}"
            do = "give the output the topic that this router reads, and its profile"
            return [Finding(cause, f"{self._at}.topic", do)], ""
        return [], f"{endpoint} {outcome.socket_type}, subscribed to {shown or 'nothing so far'}"


async def _ask(connection: Connection) -> str:
    """Ask a replay for what nobody has: it answers with END alone."""
    with contextlib.suppress(TimeoutError, ClosedError, ProtocolError):
        async with asyncio.timeout(1.0):
            await connection.send(*replay_request(NEWEST))
            while END_SEQ not in await connection.receive():
                pass
            return " answers"
    return ""


async def _subscriptions(connection: Connection) -> list[bytes]:
    found: list[bytes] = []
    with contextlib.suppress(TimeoutError, ClosedError, ProtocolError):
        async with asyncio.timeout(SUBSCRIPTION_S):
            while True:
                found.append(await connection.subscribed())
    return found


def _not_here(address: Address) -> str:
    """Return why this machine cannot listen at an address, whatever the port; empty if it can."""
    if address.is_ipc:
        directory = os.path.dirname(address.host)  # noqa: PTH120 - a path as the endpoint has it
        if address.host.startswith("@") or os.access(directory or ".", os.W_OK):
            return ""
        return f"{directory} is not there, or not to be written"
    if address.is_wildcard:
        return ""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trying:
        try:
            trying.bind((address.host, 0))
        except socket.gaierror:
            return ""
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return "it is no address of this machine"
    return ""
