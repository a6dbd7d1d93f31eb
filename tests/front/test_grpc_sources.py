"""What ``GetKvEventSources`` says through kvbus: its endpoints, or an error, and never the engine's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc import aio

from kvbus.parts.front.answers import Offer, UnanswerableError
from kvbus.parts.front.grpc.server import of_kvbus, of_vllm
from tests.front.grpc_pod import SOURCES, GrpcPod, message, running_grpc_pod
from tests.ports import free_ports

HERE = {0: Offer("tcp://*:7000", "tcp://*:7100", "", "h"), 300: Offer("tcp://a:7001", None, None, "h")}
TAIL: dict[str, bytes | int] = {"f6": b"msgpack", "f7": 1, "f8": 10_000, "f9": 100_000, "f99": b"later", "f100": 7}


def source(rank: int, endpoint: bytes = b"tcp://*:5557", **more: bytes | int) -> bytes:
    head = message(f1=b"zmq", f2=endpoint, f3=b"kv@e", f4=b"tcp://*:5558", f5=rank)
    return message(f1=head + message(**{**TAIL, **more}))


def test_what_is_not_kvbuss_business_stays() -> None:
    answer = source(0) + message(f2=5) + source(300) + message(f1=message(f1=b"grpc", f2=b"x:1"))
    assert of_vllm(answer, HERE) == (
        message(
            f1=message(f1=b"zmq", f5=0, **TAIL) + message(f2=b"tcp://h:7000", f4=b"tcp://h:7100"),
            f2=5,
            f1_b=message(f1=b"zmq", f3=b"kv@e", f5=300, **TAIL) + message(f2=b"tcp://a:7001"),
            f1_c=message(f1=b"grpc", f2=b"x:1"),
        )
    )


def test_fixed_numbers_are_skipped() -> None:
    odd = b"\x51" + bytes(8) + b"\x5d" + bytes(4)
    said = of_vllm(message(f1=message(f1=b"zmq", f2=b"tcp://*:1") + odd), HERE)
    assert said == message(f1=message(f1=b"zmq") + odd + message(f2=b"tcp://h:7000", f4=b"tcp://h:7100"))


def test_an_engine_that_says_nothing_publishes_nothing() -> None:
    assert of_vllm(b"", HERE) == b""


def test_of_kvbus_alone() -> None:
    rest: dict[str, bytes | int] = {"f6": b"msgpack", "f7": 1}
    assert of_kvbus(HERE) == message(
        f1=message(f1=b"zmq", f2=b"tcp://h:7000", f4=b"tcp://h:7100", f5=0, **rest),
        f1_b=message(f1=b"zmq", f2=b"tcp://a:7001", f5=300, **rest),
    )


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (source(1), "the engine publishes as rank 1, and kvbus has of it: 0, 300"),
        (message(f1=3), "a source is a number"),
        (message(f1=message(f5=b"0")), "a rank is no number"),
        (source(0)[:-1], "it ends in the middle"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a number has no end"),
        (b"\x0a", "a number has no end"),
        (b"\x0b", "wire type 3"),
        (b"\x09\0\0", "it ends in the middle"),
    ],
)
def test_what_cannot_be_said(answer: bytes, says: str) -> None:
    with pytest.raises(UnanswerableError, match=says):
        of_vllm(answer, HERE)


@pytest_asyncio.fixture
async def pod() -> AsyncIterator[GrpcPod]:
    async with running_grpc_pod() as pod:
        yield pod


async def test_the_engine_is_asked_and_its_answer_changed(pod: GrpcPod) -> None:
    pod.api.answers[SOURCES] = source(0)
    call = pod.unary(SOURCES, b"\x50\x01", metadata=(("x-who", "me"),))
    said = await call
    assert b"5557" not in said
    assert said == message(
        f1=message(f1=b"zmq", f3=b"kv@e", f5=0, **TAIL)
        + message(f2=pod.bus.out.encode(), f4=pod.bus.out_replay.encode())
    )
    assert ("x-head", "1") in tuple(await call.initial_metadata())
    assert ("x-tail", "3") in tuple(await call.trailing_metadata())
    ((_, asked, metadata),) = pod.api.seen
    assert asked == [b"\x50\x01"]
    assert ("x-who", "me") in metadata
    assert pod.stats.calls == {"answered": 1}


async def test_an_engine_without_the_method_is_answered_for(pod: GrpcPod) -> None:
    rest: dict[str, bytes | int] = {"f5": 0, "f6": b"msgpack", "f7": 1}
    endpoints: dict[str, bytes | int] = {"f2": pod.bus.out.encode(), "f4": pod.bus.out_replay.encode()}
    assert await pod.unary(SOURCES) == message(f1=message(f1=b"zmq", **endpoints, **rest))
    assert pod.stats.calls == {"answered": 1}


async def test_what_the_engine_refuses_is_refused(pod: GrpcPod) -> None:
    pod.api.answers[SOURCES] = grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(aio.AioRpcError) as raised:
        await pod.unary(SOURCES)
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert pod.stats.calls == {"passed": 1}


async def test_a_rank_that_kvbus_has_not_is_an_error(pod: GrpcPod) -> None:
    pod.api.answers[SOURCES] = source(0) + source(1)
    with pytest.raises(aio.AioRpcError) as raised:
        await pod.unary(SOURCES)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == (
        "kvbus cannot say where the events are: the engine publishes as rank 1, and kvbus has of it: 0"
    )
    assert pod.stats.calls == {"unanswered": 1}


async def test_a_wildcard_is_the_host_that_was_asked() -> None:
    (port,) = free_ports(1)
    async with running_grpc_pod(output={"endpoint": f"tcp://*:{port}", "replay_endpoint": None}) as pod:
        pod.api.answers[SOURCES] = source(0)
        here = message(f2=f"tcp://127.0.0.1:{port}".encode())
        assert await pod.unary(SOURCES) == message(f1=message(f1=b"zmq", f3=b"kv@e", f5=0, **TAIL) + here)
