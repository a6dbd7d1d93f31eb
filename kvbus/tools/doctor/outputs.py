"""Checks of an output: its ports, the router to which it connects (``bind: false``), or the servers of its log."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Coroutine
from typing import Any, Final

from msgspec import structs

from kvbus.config import Config, OutputConfig, SourceStream, parse_endpoint, render_topic
from kvbus.core.findings import bus as catalogue
from kvbus.core.findings.engine import CANNOT_LISTEN
from kvbus.core.findings.finding import Finding
from kvbus.core.wire.frames import ASKS_REPLAY, END_SEQ, FrameLimits, LiveMessage, parse_live, replay_request
from kvbus.core.wire.profiles import PROFILES, Profile, needs
from kvbus.parts.log.contract import UNREACHABLE, WRONG_TYPE, UnavailableError
from kvbus.parts.log.location import location_of
from kvbus.tools.doctor.findings import Report, Seen
from kvbus.tools.doctor.machine import holder
from kvbus.tools.doctor.probes import NEWEST, local
from kvbus.tools.doctor.sources import NETWORK
from kvbus.transport.curve import Curve
from kvbus.transport.dialling import ClosedError, Connection, dial
from kvbus.transport.reach import Stop
from kvbus.transport.zmtp.addresses import ipc_address, split_tcp
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.protocol import Limits
from kvbus.transport.zmtp.reasons import ProtocolError

REMEDIES: Final = {
    "authentication_failed": (
        ".password_file",
        "write the password of kvbus's user into the password file, or set it at the log's servers",
    ),
    "certificate_expired": ("endpoint", "renew the server's certificate"),
    "certificate_foreign": (".tls_ca_file", "name the authority that signed the servers' certificates"),
    "certificate_wrong_host": ("endpoint", "name the server as its certificate does"),
    "client_certificate_refused": (
        ".tls_certificate_file",
        "name a certificate by an authority that the servers trust, or none at a port for passwords",
    ),
    "cluster_denied": (".username", "add the ACL of a writer, docs/LOG.md names it"),
    "data_lost": ("endpoint", "find out why the server has lost records"),
    "denied": (".username", "add the ACL of a writer, docs/LOG.md names it"),
    "key_file": ("", "correct the file that the message names"),
    "memory_full": ("endpoint", "give the server more memory"),
    "not_saved": ("endpoint", "make room on the server's disk"),
    "primary_unknown": (".sentinel", "use the name that the Sentinels have for the primary"),
    "read_only": ("endpoint", "name the primary"),
    "slot_elsewhere": ("endpoint", "name a server that is not part of a cluster"),
    "stream_full": (".stream", "raise the stream's limits, or let it discard old messages"),
    "stream_missing": (".stream", "create both streams, docs/LOG.md says how"),
    "tls_failed": (".tls_ca_file", "name a port that speaks TLS, or leave out tls_ca_file"),
    "too_few_replicas": ("endpoint", "start the server's replicas"),
    "topic_denied": (".topic", "add the ACLs of a writer, docs/LOG.md names them"),
    "topic_missing": (".topic", "create both topics, docs/LOG.md says how"),
    "transactional_id_denied": (".username", "add the ACL of a writer, docs/LOG.md names it"),
    UNREACHABLE: ("endpoint", "name a server that runs, and tls_ca_file if that port speaks TLS"),
    WRONG_TYPE: ("endpoint", "delete the key, which holds a value of another type"),
}
"""By the reason of a failure at a log's servers: the configuration key to correct, and how to correct it.

A key that begins with a dot is in the section of the log's type, such as ``kafka``.
"""


def understood(config: Config, router: str) -> Report:
    """Compare what each output sends with the forms that a router can decode, without connecting to anything.

    A configuration may also have outputs for other routers. So there is a finding only if this router can decode no
    output.
    """
    wanted = PROFILES[router]
    report = Report(seen=[Seen("outputs", router, "; ".join(needs(wanted)) or "reads every form that kvbus sends")])
    missing: dict[str, list[str]] = {}
    for index, output in enumerate(config.outputs):
        if output.type != "zmq":
            continue
        at, lacks = f"outputs[{index}]", needs(wanted, _sent(output))
        if wanted.one_stream and output.layout == "per_topic":
            lacks.append("a connection for each stream")
        missing[at] = lacks
        text = f"does not meet these needs: {'; '.join(lacks)}" if lacks else "meets all needs"
        report.seen.append(Seen(at, output.name, text))
    if all(missing.values()):
        report.add(
            catalogue.ROUTER_MISREADS(at=at, router=router, needs="; ".join(lacks)) for at, lacks in missing.items()
        )
    return report


def _sent(output: OutputConfig) -> Profile:
    """Return a profile that describes what the output sends.

    It is the output's own profile, changed by the output's other configuration keys.
    """
    profile = PROFILES[output.profile]
    topics = profile.topics
    if output.topic is not None and topics == "any":
        if output.topic in {"", "kv-events"}:
            topics = "kv-events" if output.topic else "empty"
        elif output.topic.startswith("kv@") and output.topic.count("@") == 2:
            topics = "pod and model"
    profile = structs.replace(profile, framing=output.framing, topics=topics)
    return profile.without_tokens() if output.token_ids == "drop" else profile


async def broker(output: OutputConfig, at: str, timeout: float) -> tuple[list[Finding], str]:  # noqa: ASYNC109
    """Check the servers of the log that an output writes. Return the findings, and a sentence about the log's streams.

    The check writes nothing, because a write would take the streams from the running writer.
    """
    where = location_of(output).servers
    try:
        async with asyncio.timeout(timeout):
            return [], await LOOKS[output.type](output)
    except UnavailableError as error:
        why, reason = str(error), error.reason
    except TimeoutError:
        why, reason = "no answer", UNREACHABLE
    facts = {"name": finding_key(output.type, reason), "where": where, "why": why, "do": REMEDIES[reason][1]}
    return [catalogue.LOG_AWAY(at=at, **facts)], ""


def finding_key(kind: str, reason: str) -> str:
    """Return the configuration key to correct after a failure at a log's servers.

    Args:
        kind: the output's type, such as ``kafka``.
        reason: the reason of the failure, a key of `REMEDIES`.
    """
    key = REMEDIES[reason][0]
    return key if key == "endpoint" else kind + key


async def _kafka(output: OutputConfig) -> str:
    from kvbus.parts.log.kafka import KafkaLog  # noqa: PLC0415 - an extra
    from kvbus.parts.log.kafka_client import cause  # noqa: PLC0415 - an extra

    location = location_of(output)
    wrong = await cause(location)
    if wrong is not None:
        raise wrong
    streams = len(await KafkaLog(location).pointers())
    return f"{location.servers} has both topics, and {streams} streams in {location.topic}"


async def _nats(output: OutputConfig) -> str:
    from kvbus.parts.log.nats import NatsLog  # noqa: PLC0415 - an extra

    location = location_of(output)
    log = NatsLog(location)
    await (await log.read({})).close()
    return f"{location.servers} has both streams, and {len(await log.pointers())} of kvbus's in {location.keys.stream}"


async def _redis(output: OutputConfig) -> str:
    from kvbus.parts.log.redis import RedisLog  # noqa: PLC0415 - an extra

    location = location_of(output)
    return f"{location.servers} has {len(await RedisLog(location).pointers())} streams under {location.keys.prefix}"


LOOKS: Final = {"kafka": _kafka, "nats": _nats, "redis": _redis}
"""By type of log: a function that checks the log of an output and returns a sentence about the log's streams."""


Looked = tuple[list[Finding], str]
"""The result of probing one endpoint: the problems that doctor has found, and a description for the report."""

SUBSCRIPTION_S: Final = 0.5
"""Seconds for which doctor waits for the subscriptions of a router to which it has connected."""


class OutputProber:
    """The prober of one output. It connects to the output's ports or, with ``bind: false``, to the output's router.

    Args:
        config: the configuration.
        index: the output's position in ``outputs``.
        curve: the output's CURVE keys; None without CURVE.
        timeout: maximum seconds for each endpoint. All endpoints are probed in parallel.
        running: whether a bus runs this configuration; None if unknown.
        topics: topic of each source that has sent a message, by the source's slot.
        gate: semaphore that limits the number of endpoints that are probed at the same time.
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
        gate: asyncio.Semaphore,
    ) -> None:
        self._config = config
        self._output = config.outputs[index]
        self._at = f"outputs[{index}]"
        self._curve = curve
        self._timeout = timeout
        self._running = running
        self._topics = topics
        self._gate = gate

    async def look(self) -> Report:
        """Probe the endpoints of every stream, or the servers of the log. Return the report about the output."""
        report = Report()
        if self._output.log is not None:
            findings, text = await self._gated(broker(self._output, self._at, self._timeout))
            report.add(findings)
            report.seen.append(Seen(self._at, self._output.name, text))
            return report
        shared = self._output.layout != "per_source"
        streams = self._config.streams()[: 1 if shared else None]
        looks = []
        for stream in streams:
            endpoints = self._output.stream_endpoints(0 if shared else stream.index)
            if self._output.bind:
                looks.append(self._port(endpoints.endpoint, "endpoint", "PUB"))
            else:
                looks.append(self._router(endpoints.endpoint, self._topics_at(stream)))
            if endpoints.replay_endpoint is not None:
                looks.append(self._port(endpoints.replay_endpoint, "replay_endpoint", "ROUTER"))
            if endpoints.snapshot_endpoint is not None:
                looks.append(self._port(endpoints.snapshot_endpoint, "snapshot_endpoint", "ROUTER"))
        texts = []
        for findings, text in await asyncio.gather(*map(self._gated, looks)):
            report.add(findings)
            texts.append(text)
        report.seen.append(Seen(self._at, self._output.name, "; ".join(filter(None, texts))))
        return report

    async def _gated(self, look: Coroutine[Any, Any, Looked]) -> Looked:
        async with self._gate:
            return await look

    def _topics_at(self, stream: SourceStream) -> set[bytes]:
        """Return the topics that kvbus sends at the endpoint of a stream, as far as doctor knows them."""
        streams = self._config.streams() if self._output.layout == "per_topic" else [stream]
        return {topic for each in streams if (topic := self._topic(each)) is not None}

    def _topic(self, stream: SourceStream) -> bytes | None:
        if PROFILES[self._output.profile].topics == "empty":
            return b""
        if self._output.topic is None:
            return self._topics.get(stream.index)
        return render_topic(self._output.topic, stream, self._config)

    async def _port(self, endpoint: str, name: str, kind: str) -> Looked:
        address = parse_endpoint(endpoint)
        facts = {"at": self._at, "name": name, "endpoint": endpoint}
        if (problem := _not_here(endpoint)) and not self._running:
            return [CANNOT_LISTEN(**facts, why=problem)], ""
        role = Role.SUB if kind == "PUB" else Role.DEALER
        async with dial(local(endpoint), role, seconds=self._timeout, curve=self._as_client()) as dialled:
            outcome = dialled.outcome
            if outcome.stop is Stop.REFUSED:
                if self._running:
                    return [catalogue.LISTENS_ELSEWHERE(**facts)], ""
                return [], f"{endpoint} is free"
            if outcome.stop in NETWORK:
                # Report no problem. The host of the endpoint may be the name of a network interface, which kvbus can
                # bind but to which doctor cannot connect.
                return [], f"{endpoint} was not probed ({outcome.stop})"
            if self._running is False or (outcome.stop is Stop.OPEN and outcome.socket_type != kind):
                who = holder(address.port) if not address.is_ipc else ""
                what = f"a {outcome.socket_type} socket" if outcome.socket_type else outcome.detail or "another program"
                return [catalogue.PORT_TAKEN(**facts, who=who or what)], ""
            if dialled.connection is None:
                if outcome.stop is Stop.KEYS or outcome.stop is Stop.MECHANISM:
                    # Report no problem. Only routers have keys for this port, so doctor cannot connect.
                    return [], f"{endpoint} {outcome.mechanism}"
                return [outcome.finding(self._at, name)], ""
            answer = await self._listen(dialled.connection) if kind == "PUB" else await _ask(dialled.connection)
            if kind == "ROUTER" and not answer and name == "replay_endpoint":
                return [catalogue.OUR_REPLAY_SILENT(**facts)], ""
            return [], f"{endpoint} {outcome.socket_type}{answer}"

    def _as_client(self) -> Curve | None:
        return None if self._output.bind else self._curve

    async def _listen(self, connection: Connection) -> str:
        """Wait for one batch of the output, and return its seq as text for the report; empty if no batch comes.

        doctor subscribes like a router that requests replays, so kvbus does not send it the state.
        """
        with contextlib.suppress(TimeoutError, ClosedError, ProtocolError):
            async with asyncio.timeout(min(self._timeout, (self._output.heartbeat or 0.5) + 0.5)):
                await connection.send(b"\x01" + ASKS_REPLAY)
                await connection.send(b"\x01")
                message = parse_live(await connection.receive(), FrameLimits())
                if isinstance(message, LiveMessage):
                    return f" at seq {message.seq:,}"
        return ""

    async def _router(self, endpoint: str, topics: set[bytes]) -> Looked:
        at = self._at
        async with dial(endpoint, Role.PUB, seconds=self._timeout, curve=self._curve, limits=Limits()) as dialled:
            outcome = dialled.outcome
            if outcome.stop is Stop.REFUSED:
                return [catalogue.NO_ROUTER_LISTENS(at=at, endpoint=endpoint)], ""
            if outcome.stop is not Stop.OPEN:
                return [outcome.finding(at)], ""
            if outcome.socket_type not in {"SUB", "XSUB"}:
                return [catalogue.NOT_A_SUBSCRIBER(at=at, endpoint=endpoint, type=outcome.socket_type)], ""
            wanted = await _subscriptions(dialled.connection) if dialled.connection is not None else []
        shown = ", ".join(repr(each.decode("utf-8", "replace")) for each in wanted)
        if wanted and topics and not any(topic.startswith(tuple(wanted)) for topic in topics):
            topic = repr(min(topics).decode("utf-8", "replace"))
            who = f"the router at {endpoint}"
            return [catalogue.ROUTER_TOPIC(at=at, who=who, topics=shown, topic=topic)], ""
        return [], f"{endpoint} {outcome.socket_type}, subscribed to {shown or 'nothing so far'}"


async def _ask(connection: Connection) -> str:
    """Check that a replay endpoint of kvbus answers.

    Return a text for the report; empty if END does not come within a second.

    The requested seq is after all batches, so that the answer is only END.
    """
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


def _not_here(endpoint: str) -> str:
    """Return why this machine cannot listen at the host or directory of an endpoint; empty if it can.

    The port of the endpoint is not checked.
    """
    path = ipc_address(endpoint)
    if path is not None:
        directory = os.path.dirname(path) or "."  # noqa: PTH120 - a path as the endpoint has it
        return "" if path.startswith("\0") or os.access(directory, os.W_OK) else f"{directory} is not writable"
    host, _ = split_tcp(endpoint)
    if host == "*" or host in {name for _, name in socket.if_nameindex()}:
        return ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "the endpoint names neither an address nor an interface of this machine"
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM) as trying:
        try:
            trying.bind((host, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return "it is not an address of this machine"
    return ""
