"""A proxy of an engine's gRPC API.

It forwards all calls, and changes the answers of the methods that list event sources.

Routers, and workers on the engine's host, send their calls to kvbus. kvbus forwards calls and answers as bytes, without
decoding them.

``vllm.Control/GetKvEventSources`` and ``openengine.v1.Control/GetKvEventSources`` (TensorRT-LLM) return one source for
each rank. The two messages differ in one field: the endpoint is a string in vLLM's message, and a message in
OpenEngine's. ``sglang.runtime.v1.SglangService/GetServerInfo`` returns a string with the same JSON as SGLang's
``/server_info``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from kvbus.common.errors import BindError, os_reason
from kvbus.common.front_stats import CallStats
from kvbus.config import parse_address, parse_endpoint
from kvbus.config.front import FrontGrpc
from kvbus.parts.discovery.contract import DiscoveryError
from kvbus.parts.discovery.engine_grpc import (
    JSON_INFO,
    METADATA_LIMITS,
    SERVER_INFO,
    aio,
    grpc,
    message_fields,
    number_field,
    open_channel,
    text_field,
)
from kvbus.parts.front.answers import Offer, Offers, UnanswerableError, of_sglang, offer_of
from kvbus.parts.front.server import BusState, offers

_SOURCES: Final = 1
"""Number of the protobuf field that holds one event source in the answer of GetKvEventSources.

The field is repeated: it occurs once for each rank.
"""
_TRANSPORT, _ENDPOINT, _TOPIC, _REPLAY, _RANK, _ENCODING, _SCHEMA = range(1, 8)
"""Numbers of the protobuf fields of an event source in the answer of GetKvEventSources."""
_ZMQ: Final = b"zmq"

Endpoint: TypeAlias = Callable[[str], bytes]
"""A function that encodes an endpoint as the protobuf field of a source."""


def text_endpoint(endpoint: str) -> bytes:
    """Encode an endpoint as a protobuf field in vLLM's form, which is a string."""
    return text_field(_ENDPOINT, endpoint.encode())


def open_engine_endpoint(endpoint: str) -> bytes:
    """Encode an endpoint as a protobuf field in OpenEngine's form, a message with host, port and protocol."""
    address = parse_endpoint(endpoint)
    host, port, protocol = text_field(1, address.host.encode()), number_field(2, address.port), text_field(3, b"tcp")
    return text_field(_ENDPOINT, host + port + protocol)


def of_kvbus(offers: Offers, endpoint: Endpoint = text_endpoint) -> bytes:
    """Encode an answer of GetKvEventSources that lists kvbus's endpoints. It is for an engine that lacks this method.

    ``endpoint`` encodes an endpoint in the form of the engine's protocol.
    """
    sources = b""
    for rank, offer in sorted(offers.items()):
        head = text_field(_TRANSPORT, _ZMQ) + _announced(offer, endpoint) + number_field(_RANK, rank)
        sources += text_field(_SOURCES, head + text_field(_ENCODING, b"msgpack") + number_field(_SCHEMA, 1))
    return sources


def of_control(answer: bytes, offers: Offers, endpoint: Endpoint = text_endpoint) -> bytes:
    """Replace the endpoints in an engine's answer of GetKvEventSources by kvbus's endpoints.

    An event source that does not use ZeroMQ stays unchanged.

    Raises:
        DiscoveryError: the answer is not a message of this kind, or it lists a rank that kvbus does not have.
    """
    return b"".join(
        text_field(_SOURCES, _source(field.value, offers, endpoint)) if field.number == _SOURCES else field.raw
        for field in message_fields(answer)
    )


def of_server_info(answer: bytes, offers: Offers) -> bytes:
    """Replace the endpoints in the JSON of SGLang's answer of GetServerInfo by kvbus's endpoints.

    Raises:
        DiscoveryError: the answer is not a message of this kind, or its form cannot express kvbus's endpoints.
    """
    return b"".join(
        text_field(JSON_INFO, _server_info(field.value, offers)) if field.number == JSON_INFO else field.raw
        for field in message_fields(answer)
    )


def _server_info(info: int | bytes, offers: Offers) -> bytes:
    try:
        said = json.loads(info if isinstance(info, bytes) else b"")
    except ValueError:
        raise UnanswerableError("the engine's answer is not JSON") from None
    return json.dumps(of_sglang(said, offers)).encode()


def _source(message: int | bytes, offers: Offers, endpoint: Endpoint) -> bytes:
    fields = list(message_fields(message))
    last = {field.number: field.value for field in fields}
    if last.get(_TRANSPORT, _ZMQ) != _ZMQ:
        return b"".join(field.raw for field in fields)
    rank = last.get(_RANK, 0)
    if not isinstance(rank, int):
        raise UnanswerableError("the engine's answer does not list event sources: a rank is not a number")
    offer = offer_of(rank, offers)
    ours = {_ENDPOINT, _REPLAY} if offer.topic is None else {_ENDPOINT, _REPLAY, _TOPIC}
    return b"".join(field.raw for field in fields if field.number not in ours) + _announced(offer, endpoint)


def _announced(offer: Offer, endpoint: Endpoint) -> bytes:
    texts = ((_TOPIC, offer.topic), (_REPLAY, offer.replay_reached))
    # Leave out fields whose text is empty, as proto3 does.
    return endpoint(offer.reached) + b"".join(text_field(number, text.encode()) for number, text in texts if text)


log = logging.getLogger("kvbus.front.grpc.server")
# Drop the traceback that gRPC logs for a call with invalid metadata, because kvbus itself refuses such a call.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "Invalid encoding" not in str(record.msg))

HANDSHAKE: Final = 20_000
"""Maximum time in milliseconds that a client may take for the HTTP/2 handshake."""
DEAD: Final = 60_000
"""Time in milliseconds without data after which gRPC pings a client.

gRPC closes the connection if the client does not answer the ping within 20 s.
"""
ALONE: Final = 0.1
"""Time in seconds for which kvbus waits for the end of a request after its first message, before it calls the engine.

A request that ends within this time is forwarded as a single message.
"""
GRACE: Final = 1.0
"""Time in seconds for which calls in progress may continue when kvbus shuts down."""
CHECK_SECONDS: Final = 0.01
"""Time in seconds between two checks of whether the connection to the engine was lost.

Several checks are needed, because gRPC reports a lost connection only after it has ended the calls of that connection.
"""
CHECKS: Final = 10

_SERVER: Final = (
    *METADATA_LIMITS,
    ("grpc.so_reuseport", 0),  # with SO_REUSEPORT, a second kvbus could listen on the same port
    ("grpc.server_handshake_timeout_ms", HANDSHAKE),
    ("grpc.keepalive_time_ms", DEAD),
    # Accept any number of pings, as engines do. Otherwise gRPC would send a GOAWAY, which ends the client's calls.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
Context: TypeAlias = aio.ServicerContext


class _Answer(NamedTuple):
    """The functions that make the answer of one method that lists event sources.

    Attributes:
        changed: function that puts kvbus's endpoints into the engine's answer.
        own: function that makes an answer if the engine does not have the method; None if kvbus cannot answer without
            the engine.
    """

    changed: Callable[[bytes, Offers], bytes]
    own: Callable[[Offers], bytes] | None


_ASKED: Final = {
    "/vllm.Control/GetKvEventSources": _Answer(of_control, of_kvbus),
    "/openengine.v1.Control/GetKvEventSources": _Answer(
        partial(of_control, endpoint=open_engine_endpoint), partial(of_kvbus, endpoint=open_engine_endpoint)
    ),
    SERVER_INFO: _Answer(of_server_info, None),
}


class GrpcFront:
    """A gRPC server to which routers connect in place of the engine.

    Args:
        observed: the daemon, from which its configuration and its current sources are read.
        front: the configuration section ``front_grpc``.
    """

    def __init__(self, observed: BusState, front: FrontGrpc) -> None:
        self._front = front
        self._observed = observed
        self.stats = CallStats(front.max_calls)
        self.address: tuple[str, int] | None = None

    async def start(self) -> None:
        """Start listening.

        Raises:
            BindError: the address cannot be bound.
        """
        sizes = [(f"grpc.max_{way}_message_length", self._front.max_message) for way in ("receive", "send")]
        connections = ("grpc.max_allowed_incoming_connections", self._front.max_connections)
        self._channel = open_channel(self._front.engine, sizes)
        self._server = aio.server(options=[*_SERVER, connections, *sizes])
        self._server.add_generic_rpc_handlers((self,))
        host, port = parse_address(self._front.listen)
        try:
            port = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise BindError(f"front_grpc {host}:{port}", _refusal(host, port)) from error
        await self._server.start()
        self.address = (host, port)

    async def close(self) -> None:
        """Stop listening. End the open calls after :data:`GRACE` seconds."""
        if self.address is not None:
            self.address = None
            await self._server.stop(GRACE)
            await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Return the handler of a call. It forwards the call's messages as bytes, whatever method is called."""

        async def each(_: object, context: Context) -> None:
            await self._each(details.method, context)

        return grpc.stream_stream_rpc_method_handler(each)

    async def _each(self, method: str, context: Context) -> None:
        stats = self.stats
        if stats.open >= stats.limit:
            stats.calls["too_many"] += 1
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"kvbus forwards up to {stats.limit} calls at a time"
            )
        if odd := [name for name, value in _metadata(context) if isinstance(value, str) and not _is_ascii(value)]:
            stats.calls["bad_request"] += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"kvbus forwards only ASCII metadata: {odd[0]}")
        stats.open += 1
        over = _Over(stats)
        try:
            if (asked := _ASKED.get(method)) is None:
                await self._hand_on(method, context, over)
            else:
                await self._where(method, asked, context, over)
        except asyncio.CancelledError:
            over("client_gone")
            raise
        finally:
            stats.open -= 1

    async def _hand_on(self, method: str, context: Context, over: _Over) -> None:
        """Forward a call to the engine, and forward the engine's answer to the client.

        Each message is sent as soon as it comes, but not faster than the client reads.
        """
        call, sending = await self._begin(method, context)
        begun = False
        try:
            head = await call.initial_metadata()
            begun = call.done() is False
            await context.send_initial_metadata(tuple(head))
            while (message := await call.read()) is not aio.EOF:
                await context.write(message)
        except aio.AioRpcError:
            pass  # the engine's status is forwarded below
        finally:
            if sending is not None:
                sending.cancel()
            call.cancel()
        over(await self._outcome(call, begun=begun))
        await _end(call, context)

    async def _begin(self, method: str, context: Context) -> tuple[Any, asyncio.Future[None] | None]:
        """Begin the call to the engine. Return the call, and the task that forwards the client's further messages.

        The task is None if the request has only one message, as nearly all requests have. kvbus then writes that
        message and the end of the request together. This avoids a fault of grpcio: if it writes to a call that the
        engine has ended, it loses the engine's status and reports INTERNAL.
        """
        options = {"timeout": context.time_remaining(), "metadata": _metadata(context)}
        first = await context.read()
        more = asyncio.ensure_future(_next(context, first))
        try:
            await asyncio.wait({more}, timeout=ALONE)
        except asyncio.CancelledError:
            more.cancel()
            raise
        if first is not aio.EOF and more.done() and more.result() is aio.EOF:
            return self._channel.unary_stream(method)(first, **options), None
        call = self._channel.stream_stream(method)(**options)
        return call, asyncio.ensure_future(_send(context, call, first, more))

    async def _outcome(self, call: Any, *, begun: bool) -> str:
        """Return how a call to the engine has ended, as a key of kvbus's counters.

        The status UNAVAILABLE may be the engine's own answer, or it may mean that the connection to the engine was
        lost. The state of the channel distinguishes the two cases.

        Args:
            call: the call to the engine.
            begun: whether the engine's answer had begun.
        """
        if await call.code() is grpc.StatusCode.UNAVAILABLE:
            for _ in range(CHECKS):
                if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
                    return "engine_broke_off" if begun else "engine_down"
                await asyncio.sleep(CHECK_SECONDS)
        return "passed"

    async def _where(self, method: str, made: _Answer, context: Context, over: _Over) -> None:
        """Answer a call for the endpoints of the engine's events. Put kvbus's endpoints in place of the engine's.

        The other fields of the engine's answer stay unchanged. If the engine answers with an error, forward it.
        """
        asked = await context.read()
        call = self._channel.unary_unary(method)(
            b"" if asked is aio.EOF else asked, timeout=context.time_remaining(), metadata=_metadata(context)
        )
        try:
            answer = await call
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED or made.own is None:
                over(await self._outcome(call, begun=False))
                await _end(call, context)
            answer = None
        try:
            offered = self._offers(context)
            said = made.changed(answer, offered) if answer is not None else made.own(offered) if made.own else b""
        except DiscoveryError as error:
            log.warning("%s: %s", method, error)
            over("unanswered")
            text = f"kvbus cannot say where the events are: {error}"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
        over("answered")
        if answer is not None:
            context.set_trailing_metadata(tuple(await call.trailing_metadata()))
            await context.send_initial_metadata(tuple(await call.initial_metadata()))
        await context.write(said)

    def _offers(self, context: Context) -> Offers:
        return offers(self._observed, self._front, self._front.host or local_address(context.peer()))


class _Over:
    """A function that counts how one call has ended. If it is called again for the same call, it does nothing."""

    def __init__(self, stats: CallStats) -> None:
        self._stats = stats
        self._known = False

    def __call__(self, outcome: str) -> None:
        if not self._known:
            self._known = True
            self._stats.calls[outcome] += 1


async def _end(call: Any, context: Context) -> None:
    """End the client's call with the status and the trailing metadata with which the engine has ended its call."""
    code, trailing = await call.code(), tuple(await call.trailing_metadata() or ())
    if code is not grpc.StatusCode.OK:
        await context.abort(code, await call.details() or "", trailing)
    context.set_trailing_metadata(trailing)


async def _next(context: Context, message: Any) -> Any:
    """Return the client's next message, or the end of the request.

    ``message`` is the message that was read last. If it is the end of the request, it is returned again.
    """
    return message if message is aio.EOF else await context.read()


async def _send(context: Context, call: Any, first: Any, more: asyncio.Future[Any]) -> None:
    """Forward the client's messages, and the end of its request, to the engine.

    Args:
        context: the client's call.
        call: the call to the engine.
        first: the client's first message.
        more: a task that returns the client's second message.
    """
    try:
        if first is not aio.EOF:
            await call.write(first)
        message = await more
        while message is not aio.EOF:
            await call.write(message)
            message = await context.read()
        await call.done_writing()
    except (aio.AioRpcError, aio.InternalError, asyncio.InvalidStateError):
        pass  # the engine has ended the call; the coroutine that reads its answer handles that
    finally:
        more.cancel()


def _refusal(host: str, port: int) -> str:
    """Try to bind an address, and return the reason why that fails.

    This is needed because gRPC does not report why it cannot listen at an address.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as trying:
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trying.bind(address)
    except OSError as error:
        return os_reason(error)
    return "gRPC cannot bind it"


def _metadata(context: Context) -> tuple[tuple[str, str | bytes], ...]:
    """Return a call's metadata without ``user-agent``, because gRPC sends its own ``user-agent`` to the engine."""
    return tuple((name, value) for name, value in context.invocation_metadata() or () if name != "user-agent")


def _is_ascii(value: str) -> bool:
    """Return whether gRPC can send ``value`` as metadata. gRPC also receives values that it cannot send."""
    return value.isascii() and value.isprintable()


def local_address(peer: str) -> str:
    """Return the address of this host from which it reaches a client.

    kvbus puts this address into its answers in place of a wildcard. It is found by the client's address, because gRPC
    does not report the address to which the client connected.

    Args:
        peer: the client's address in gRPC's form, ``ipv4:10.0.0.3:4711`` or ``ipv6:%5Bfd00::1%5D:4711``.
    """
    family, _, where = unquote(peer).partition(":")
    with socket.socket(socket.AF_INET6 if family == "ipv6" else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((where.rpartition(":")[0].strip("[]"), 9))  # UDP: sends no packet, only chooses the local address
        here = str(way.getsockname()[0])
    return f"[{here}]" if ":" in here else here
