"""Tests for the gRPC front.

It forwards calls unchanged in both directions. If one side breaks off a call, the other side learns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import shutil
import subprocess
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc import aio

from kvbus.common.errors import BindError
from kvbus.parts.front.grpc import local_address
from tests.doubles.bus import eventually
from tests.doubles.link import Link
from tests.front.grpc_pod import SOURCES, UNLIMITED, GrpcPod, running_grpc_pod
from tests.ports import free_ports

LARGE = 16 * 1024 * 1024
OTHER = "/vllm.Inference/Generate"
REFUSALS = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


@pytest_asyncio.fixture
async def pod() -> AsyncIterator[GrpcPod]:
    async with running_grpc_pod() as pod:
        yield pod


async def error_of(call: aio.Call) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as raised:
        await call
    return raised.value


async def test_the_grpc_front_forwards_a_call_and_its_answer_unchanged(pod: GrpcPod) -> None:
    pod.api.answers[OTHER] = b"\0an answer\xff"
    metadata = (("x-data-parallel-rank", "3"), ("x-twice", "1"), ("x-twice", "2"), ("x-raw-bin", b"\0\xfe"))
    call = pod.unary(OTHER, b"\xffa question\0", metadata=(*metadata, ("authorization", "Bearer k")))
    assert await call == b"\0an answer\xff"
    assert tuple(await call.initial_metadata()) == (("x-head", "1"), ("x-head", "2"), ("x-raw-bin", b"\0\1\xff"))
    assert tuple(await call.trailing_metadata()) == (("x-tail", "3"), ("x-tail-bin", b"\xfe"))
    assert await call.code() is grpc.StatusCode.OK
    ((method, messages, seen),) = pod.api.seen
    assert (method, messages) == (OTHER, [b"\xffa question\0"])
    assert [each for each in seen if each[0] != "user-agent"] == [*metadata, ("authorization", "Bearer k")]
    assert sum(name == "user-agent" for name, _ in seen) == 1
    assert pod.stats.calls == {"passed": 1}


@pytest.mark.parametrize("code", REFUSALS)
async def test_the_grpc_front_forwards_a_refusal_unchanged(pod: GrpcPod, code: grpc.StatusCode) -> None:
    pod.api.answers[OTHER] = code
    error = await error_of(pod.unary(OTHER))
    assert (error.code(), error.details()) == (code, f"{code.name}: ä")
    assert tuple(error.trailing_metadata()) == (("grpc-status-details-bin", b"\0\xff" * 3), ("x-why", "so"))
    assert pod.stats.calls == {"passed": 1}


async def test_the_grpc_front_forwards_each_message_at_once_in_each_direction(pod: GrpcPod) -> None:
    call = pod.both("/x/Echo")
    for each in (b"", b"1", bytes(LARGE), b"2" * 70_000):
        await call.write(each)
        assert await call.read() == each
    await call.done_writing()
    assert await call.read() is aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert pod.stats.calls == {"passed": 1}
    assert pod.stats.open == 0


@pytest.mark.parametrize("messages", [[], [b""], [b"", b"", b""], [b"1", b"1", b"", b"1"]])
async def test_the_grpc_front_forwards_every_message_even_if_empty(pod: GrpcPod, messages: list[bytes]) -> None:
    for way in (lambda: pod.channel.stream_unary(OTHER)(iter(messages)), lambda: pod.both(OTHER)):
        pod.api.answers[OTHER] = b"got"
        call = way()
        if isinstance(call, aio.StreamStreamCall):
            for each in messages:
                await call.write(each)
            await call.done_writing()
            assert await call.read() == b"got"
        else:
            assert await call == b"got"
    assert [sent for _, sent, _ in pod.api.seen] == [messages] * 2


async def test_a_grpc_message_beyond_the_limit_ends_its_call() -> None:
    async with running_grpc_pod({"max_message": 4 * 1024 * 1024}) as pod:
        up = await error_of(pod.unary("/x/Echo", bytes(4 * 1024 * 1024 + 1)))
        assert up.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await eventually(lambda: pod.stats.open == 0, "it is over")
        assert pod.stats.calls == {"client_gone": 1}
        down = pod.both("/x/Stream")
        await down.write(str(4 * 1024 * 1024 + 1).encode())
        pod.api.step.release()
        with pytest.raises(aio.AioRpcError) as raised:
            await down.read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await pod.unary("/x/Echo", bytes(4 * 1024 * 1024)) == bytes(4 * 1024 * 1024)


async def test_a_call_that_its_client_cancels_ends_at_the_engine(pod: GrpcPod) -> None:
    call = pod.unary("/x/Think")
    await pod.api.asked.wait()
    assert pod.stats.open == 1
    call.cancel()
    await pod.api.gone.wait()
    await eventually(lambda: pod.stats.open == 0, "the call is over")
    assert pod.stats.calls == {"client_gone": 1}


async def test_clients_see_that_the_engine_stops_and_returns(pod: GrpcPod) -> None:
    call = pod.both("/x/Stream")
    await call.write(b"3")
    pod.api.step.release()
    assert await call.read() == bytes(3)
    await pod.server.stop(None)
    with pytest.raises(aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is not grpc.StatusCode.OK
    down = await error_of(pod.unary(OTHER))
    assert down.code() is grpc.StatusCode.UNAVAILABLE
    assert pod.stats.calls["engine_down"] == 1
    pod.api.answers[OTHER] = b"back"
    pod.server = await pod.start_engine()

    async def back() -> bytes:
        while True:
            try:
                return await pod.unary(OTHER)
            except aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017
                await asyncio.sleep(0.05)

    assert await asyncio.wait_for(back(), 60) == b"back"


async def test_the_grpc_front_forwards_the_deadline_to_the_engine(pod: GrpcPod) -> None:
    begin = time.monotonic()
    error = await error_of(pod.unary("/x/Think", timeout=1.5))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - begin >= 1.4
    assert pod.api.remaining is not None
    assert 0 < pod.api.remaining < 1.6  # gRPC rounds the timeout up
    await pod.api.gone.wait()


async def test_a_call_without_a_deadline_has_no_deadline_at_the_engine(pod: GrpcPod) -> None:
    pod.api.answers[OTHER] = b""
    assert await pod.unary(OTHER, timeout=None) == b""
    assert pod.api.remaining is None


async def test_the_grpc_front_reads_only_as_fast_as_the_receiver(pod: GrpcPod) -> None:
    """The front reads an answer from the engine only as fast as the client reads it, so the engine has to wait.

    In the same way, a client that sends faster than the engine reads has to wait.
    """
    down = pod.both("/x/Stream")
    await down.write(b"100000")
    for _ in range(2000):
        pod.api.step.release()
    await wait_until_constant(lambda: pod.api.sent)
    stood = pod.api.sent
    assert stood < 1000
    for _ in range(2000):
        assert len(await down.read()) == 100_000
    assert pod.api.sent == 2000
    up, written = pod.both("/x/Upload"), 0

    async def write() -> None:
        nonlocal written
        for _ in range(2000):
            await up.write(bytes(100_000))
            written += 1
        await up.done_writing()

    writing = asyncio.ensure_future(write())
    await wait_until_constant(lambda: written)
    assert written < 1000
    pod.api.take.set()
    assert await up.read() == b"200000000"
    await writing


async def wait_until_constant(count) -> None:
    """Wait until a number has not changed for a second."""
    last, since = count(), time.monotonic()
    while time.monotonic() - since < 1.0:
        await asyncio.sleep(0.05)
        if count() != last or not last:
            last, since = count(), time.monotonic()


async def test_the_grpc_front_refuses_calls_beyond_max_calls() -> None:
    async with running_grpc_pod({"max_calls": 2}) as pod:
        under_way = [pod.unary("/x/Think") for _ in range(2)]
        await eventually(lambda: pod.stats.open == 2, "two calls")
        error = await error_of(pod.unary(SOURCES))
        assert (error.code(), error.details()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "kvbus forwards up to 2 calls at a time",
        )
        for each in under_way:
            each.cancel()
        await eventually(lambda: pod.stats.open == 0, "both are over")
        assert await pod.unary("/x/Echo", b"1") == b"1"
        assert pod.stats.calls == {"too_many": 1, "client_gone": 2, "passed": 1}


async def test_the_grpc_front_closes_connections_beyond_max_connections() -> None:
    async with running_grpc_pod({"max_connections": 2}) as pod:
        assert await pod.unary("/x/Echo", b"1") == b"1"
        _, second = await asyncio.open_connection(*pod.address.split(":"))
        await asyncio.sleep(0.1)
        reader, third = await asyncio.open_connection(*pod.address.split(":"))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        assert await pod.unary("/x/Echo", b"2") == b"2"
        for each in (second, third):
            each.close()


async def test_a_client_sees_an_error_if_the_engine_breaks_off_its_answer(pod: GrpcPod) -> None:
    (listening,) = free_ports(1)
    link = Link("engine", listening, pod.port)
    await link.start()
    async with running_grpc_pod({"engine": f"127.0.0.1:{listening}"}) as other:
        call = other.both("/x/Stream")
        await call.write(b"3")
        pod.api.step.release()
        assert await call.read() == bytes(3)
        assert link.cut(reset=True) == 1
        with pytest.raises(aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert other.stats.calls == {"engine_broke_off": 1}
    await link.close()


async def test_the_grpc_front_accepts_frequent_pings_of_a_client(pod: GrpcPod) -> None:
    often = (("grpc.keepalive_time_ms", 100), ("grpc.http2.max_pings_without_data", 0))
    async with aio.insecure_channel(pod.address, options=(*often, *UNLIMITED)) as channel:
        call = channel.stream_stream("/x/Echo")(timeout=120)
        await call.write(b"1")
        assert await call.read() == b"1"
        await asyncio.sleep(3)  # about thirty pings, more than gRPC allows by default
        await call.write(b"2")
        assert await call.read() == b"2"
        call.cancel()


async def test_invalid_bytes_do_not_disturb_the_grpc_front(pod: GrpcPod) -> None:
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64, bytes(70_000)):
        reader, writer = await asyncio.open_connection(*pod.address.split(":"))
        writer.write(junk)
        with contextlib.suppress(OSError):  # the connection may be closed already
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert await pod.unary("/x/Echo", b"1") == b"1"


async def test_the_grpc_front_keeps_no_data_of_ended_calls(pod: GrpcPod) -> None:
    """The front counts each call once and keeps no data of it, whatever ends the call.

    The client ends it, its deadline passes, the engine refuses it, or the engine stops.
    """
    rng, wrong = random.Random(0), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    pod.api.answers = {OTHER: b"a", "/x/No": grpc.StatusCode.ABORTED, SOURCES: b""}
    tasks = len(asyncio.all_tasks())

    async def one() -> None:
        call = pod.both(rng.choice([OTHER, "/x/No", "/x/Think", "/x/Echo", SOURCES]), timeout=rng.choice([0.05, 0.3]))
        with contextlib.suppress(aio.AioRpcError, aio.InternalError, asyncio.InvalidStateError, asyncio.CancelledError):
            for _ in range(rng.randrange(4)):
                await call.write(b"x")
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() / 50)
                call.cancel()
            await call.done_writing()
            while await call.read() is not aio.EOF:
                pass

    for turn in range(12):
        ending = asyncio.ensure_future(pod.server.stop(None)) if turn == 6 else None
        await asyncio.gather(*(one() for _ in range(40)))
        if ending is not None:
            await ending
            pod.server = await pod.start_engine()
    await eventually(lambda: pod.stats.open == 0, "all are over")
    assert set(pod.stats.calls) <= {"passed", "answered", "client_gone", "engine_down", "engine_broke_off"}
    assert 100 < sum(pod.stats.calls.values()) <= 480
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, "no task is left")
    gc.collect()
    assert not wrong


async def test_the_grpc_front_refuses_metadata_that_it_cannot_forward(
    pod: GrpcPod, caplog: pytest.LogCaptureFixture
) -> None:
    """The front refuses a call with metadata that it cannot forward.

    The test uses curl, because gRPC's own clients do not send such metadata.
    """
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    flags: list[str | bytes] = [
        "-s",
        "--http2-prior-knowledge",
        "-H",
        "te: trailers",
        "-H",
        "content-type: application/grpc",
    ]
    for odd in (b"x-odd: \xff", "x-odd: ä".encode()):
        process = await asyncio.create_subprocess_exec(
            *(curl, *flags, b"-H", odd, "--data-binary", "@-", f"http://{pod.address}{OTHER}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        await process.communicate(b"\0\0\0\0\1q")  # curl may report no answer that came while it was sending
    await eventually(lambda: pod.stats.calls["bad_request"] == 2, "both are refused")
    assert (pod.stats.calls, pod.api.seen, caplog.records) == ({"bad_request": 2}, [], [])


async def test_a_used_address_of_the_grpc_front_is_an_error(pod: GrpcPod) -> None:
    with pytest.raises(BindError, match=f"front_grpc {pod.address}"):
        async with running_grpc_pod({"listen": pod.address}):
            pass


async def test_the_end_of_the_grpc_front_ends_its_open_calls() -> None:
    async with running_grpc_pod() as pod:
        call = pod.unary("/x/Think")
        await pod.api.asked.wait()
        await pod.bus.daemon.fronts.close()
        assert (await error_of(call)).code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(("peer", "here"), [("ipv4:127.0.0.1:4711", "127.0.0.1"), ("ipv6:%5B::1%5D:4711", "[::1]")])
def test_the_grpc_front_returns_its_address_that_a_peer_reached(peer: str, here: str) -> None:
    assert local_address(peer) == here
