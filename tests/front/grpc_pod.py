"""A pod for tests of kvbus's gRPC front, its proxy before an engine's gRPC API.

It has the engine's API, the front, and the engine's event publisher.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc import aio

from tests.doubles.bus import Bus, running_bus
from tests.ports import free_ports

CONTROL = "/vllm.Control/"
SOURCES = CONTROL + "GetKvEventSources"
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def number(value: int) -> bytes:
    """Encode an integer as a protobuf varint."""
    out = b""
    while value > 127:
        out, value = out + bytes([value % 128 + 128]), value // 128
    return out + bytes([value])


def message(**fields: bytes | int) -> bytes:
    """Encode a protobuf message with the fields f1, f2 and so on, in the given order."""
    out = b""
    for name, value in fields.items():
        at = int(name[1:].split("_")[0]) * 8
        out += number(at) + number(value) if isinstance(value, int) else number(at + 2) + number(len(value)) + value
    return out


class GrpcApi:
    """A double of an engine's gRPC API, with answers that are difficult to forward.

    ``answers`` are the answers by method. The semaphore ``step`` lets a test send the messages of a stream one by one:
    each call of ``step.release()`` sends the next message.
    """

    def __init__(self) -> None:
        self.answers: dict[str, bytes | grpc.StatusCode] = {}
        self.seen: list[tuple[str, list[bytes], list[tuple[str, str | bytes]]]] = []
        self.step = asyncio.Semaphore(0)
        self.take = asyncio.Event()
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()
        self.remaining: float | None = None
        self.sent = self.taken = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def each(_: object, context: aio.ServicerContext) -> None:
            self.remaining = context.time_remaining()
            try:
                await getattr(self, details.method.rpartition("/")[2].lower(), self._known)(details.method, context)
            except asyncio.CancelledError:
                self.gone.set()
                raise

        return grpc.stream_stream_rpc_method_handler(each)

    async def _known(self, method: str, context: aio.ServicerContext) -> None:
        messages = [each async for each in _messages(context)]
        self.seen.append((method, messages, [tuple(each) for each in context.invocation_metadata() or ()]))
        answer = self.answers.get(method, grpc.StatusCode.UNIMPLEMENTED)
        if isinstance(answer, grpc.StatusCode):
            details = b"\0\xff" * 3
            await context.abort(answer, f"{answer.name}: ä", (("grpc-status-details-bin", details), ("x-why", "so")))
        await context.send_initial_metadata((("x-head", "1"), ("x-head", "2"), ("x-raw-bin", b"\0\1\xff")))
        await context.write(answer)
        context.set_trailing_metadata((("x-tail", "3"), ("x-tail-bin", b"\xfe")))

    async def echo(self, _: str, context: aio.ServicerContext) -> None:
        """Answer each message with the same message."""
        async for each in _messages(context):
            await context.write(each)

    async def stream(self, _: str, context: aio.ServicerContext) -> None:
        """Send one message each time the test releases the semaphore ``step``, as fast as the client reads."""
        size = int(await context.read())
        while True:
            await self.step.acquire()
            await context.write(bytes(size))
            self.sent += 1

    async def upload(self, _: str, context: aio.ServicerContext) -> None:
        """Read no message before ``take`` is set. Then read all messages, and return their number of bytes."""
        await self.take.wait()
        async for each in _messages(context):
            self.taken += len(each)
        await context.write(str(self.taken).encode())

    async def think(self, _: str, __: aio.ServicerContext) -> None:
        """Record that the method was called, and never answer."""
        self.asked.set()
        await asyncio.get_running_loop().create_future()


async def _messages(context: aio.ServicerContext) -> AsyncIterator[bytes]:
    while (each := await context.read()) is not aio.EOF:
        yield each


async def serve(api: GrpcApi, port: int) -> aio.Server:
    """Serve the double of an engine's gRPC API at a loopback port, and return the server."""
    server = aio.server(options=[("grpc.so_reuseport", 0), *UNLIMITED])
    server.add_generic_rpc_handlers((api,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


class GrpcPod:
    """A running pod: the engine's API, kvbus with its front, and functions that call the front."""

    def __init__(self, api: GrpcApi, bus: Bus, port: int, start_engine: Callable[[], Any]) -> None:
        self.api = api
        self.bus = bus
        self.port = port
        self.start_engine = start_engine
        self.server: aio.Server
        self.channel: aio.Channel
        front = bus.daemon.fronts.grpc
        assert front is not None
        assert front.address is not None
        self.stats = front.stats
        self.address = f"127.0.0.1:{front.address[1]}"

    def unary(self, method: str, asked: bytes = b"", **more: Any) -> Any:
        return self.channel.unary_unary(method)(asked, **{"timeout": 120, **more})

    def both(self, method: str, **more: Any) -> Any:
        return self.channel.stream_stream(method)(**{"timeout": 120, **more})


@contextlib.asynccontextmanager
async def running_grpc_pod(front: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[GrpcPod]:
    """Run an engine's gRPC API, and a kvbus whose front forwards calls to it."""
    api = GrpcApi()
    (port,) = free_ports(1)

    async def start_engine() -> aio.Server:
        return await serve(api, port)

    keys = {"listen": "127.0.0.1:0", "engine": f"127.0.0.1:{port}", **(front or {})}
    server = await start_engine()
    try:
        async with running_bus(front_grpc=keys, **settings) as bus:
            pod = GrpcPod(api, bus, port, start_engine)
            pod.server = server
            async with aio.insecure_channel(pod.address, options=UNLIMITED) as pod.channel:
                yield pod
            server = pod.server
    finally:
        await server.stop(None)
