"""Tests for ``GetKvEventSources`` through kvbus: it answers kvbus's endpoints or an error, never the engine's own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio

from kvbus.parts.discovery.contract import DiscoveryError
from kvbus.parts.front.answers import Offer
from kvbus.parts.front.grpc import of_control, of_kvbus, of_server_info, open_engine_endpoint
from tests.front.grpc_pod import SOURCES, GrpcPod, message, running_grpc_pod
from tests.ports import free_ports

HERE = {0: Offer("tcp://*:7000", "tcp://*:7100", "", "h"), 300: Offer("tcp://a:7001", None, None, "h")}
TAIL: dict[str, bytes | int] = {"f6": b"msgpack", "f7": 1, "f8": 10_000, "f9": 100_000, "f99": b"later", "f100": 7}


def source(rank: int, endpoint: bytes = b"tcp://*:5557", **more: bytes | int) -> bytes:
    head = message(f1=b"zmq", f2=endpoint, f3=b"kv@e", f4=b"tcp://*:5558", f5=rank)
    return message(f1=head + message(**{**TAIL, **more}))


def test_the_grpc_front_changes_only_the_endpoints_of_zmq_sources() -> None:
    answer = source(0) + message(f2=5) + source(300) + message(f1=message(f1=b"grpc", f2=b"x:1"))
    assert of_control(answer, HERE) == (
        message(
            f1=message(f1=b"zmq", f5=0, **TAIL) + message(f2=b"tcp://h:7000", f4=b"tcp://h:7100"),
            f2=5,
            f1_b=message(f1=b"zmq", f3=b"kv@e", f5=300, **TAIL) + message(f2=b"tcp://a:7001"),
            f1_c=message(f1=b"grpc", f2=b"x:1"),
        )
    )


def test_the_grpc_front_keeps_unknown_fixed_size_fields() -> None:
    odd = b"\x51" + bytes(8) + b"\x5d" + bytes(4)
    said = of_control(message(f1=message(f1=b"zmq", f2=b"tcp://*:1") + odd), HERE)
    assert said == message(f1=message(f1=b"zmq") + odd + message(f2=b"tcp://h:7000", f4=b"tcp://h:7100"))


def test_an_empty_answer_of_the_engine_stays_empty() -> None:
    assert of_control(b"", HERE) == b""


def test_the_grpc_front_can_answer_without_the_engine() -> None:
    rest: dict[str, bytes | int] = {"f6": b"msgpack", "f7": 1}
    assert of_kvbus(HERE) == message(
        f1=message(f1=b"zmq", f2=b"tcp://h:7000", f4=b"tcp://h:7100", f5=0, **rest),
        f1_b=message(f1=b"zmq", f2=b"tcp://a:7001", f5=300, **rest),
    )


def test_the_grpc_front_writes_the_endpoint_of_openengine_in_parts() -> None:
    endpoint = message(f1=b"127.0.0.1", f2=5557, f3=b"tcp")
    said = of_control(message(f1=message(f1=b"zmq", f2=endpoint, f5=0, **TAIL)), HERE, open_engine_endpoint)
    ours = message(f1=b"h", f2=7000, f3=b"tcp")
    assert said == message(f1=message(f1=b"zmq", f5=0, **TAIL) + message(f2=ours, f4=b"tcp://h:7100"))


def server_info(**events: Any) -> bytes:
    described = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "", **events}
    return message(f1=json.dumps({"page_size": 16, "kv_events": described}).encode())


def test_the_server_info_of_sglang_has_the_ports_of_kvbus() -> None:
    said = of_server_info(server_info(dp_size=1) + message(f9=b"later"), HERE)
    ports = {"endpoint_port_base": 7000, "replay_endpoint_port_base": 7100}
    assert said == server_info(dp_size=1, **ports) + message(f9=b"later")


def test_the_grpc_front_does_not_change_an_sglang_answer_without_events() -> None:
    silent = message(f1=json.dumps({"kv_events": None}).encode())
    assert of_server_info(silent, HERE) == silent


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (server_info(dp_size=2), "the engine publishes rank 1, and kvbus has only these of its ranks: 0, 300"),
        (message(f1=b"{"), "the engine's answer is not JSON"),
        (message(f1=1), "the engine's answer is not JSON"),
    ],
)
def test_the_grpc_front_refuses_a_server_info_that_it_cannot_change(answer: bytes, says: str) -> None:
    with pytest.raises(DiscoveryError, match=says):
        of_server_info(answer, HERE)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (source(1), "the engine publishes rank 1, and kvbus has only these of its ranks: 0, 300"),
        (message(f1=3), "it has a number in place of a source"),
        (message(f1=message(f5=b"0")), "a rank is not a number"),
        (source(0)[:-1], "it ends in the middle"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a number has no end"),
        (b"\x0a", "a number has no end"),
        (b"\x0b", "wire type 3"),
        (b"\x09\0\0", "it ends in the middle"),
    ],
)
def test_the_grpc_front_refuses_sources_that_it_cannot_replace(answer: bytes, says: str) -> None:
    with pytest.raises(DiscoveryError, match=says):
        of_control(answer, HERE)


@pytest_asyncio.fixture
async def pod() -> AsyncIterator[GrpcPod]:
    async with running_grpc_pod() as pod:
        yield pod


async def test_the_grpc_front_asks_the_engine_and_changes_its_answer(pod: GrpcPod) -> None:
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


async def test_the_grpc_front_answers_for_an_engine_without_the_method(pod: GrpcPod) -> None:
    rest: dict[str, bytes | int] = {"f5": 0, "f6": b"msgpack", "f7": 1}
    endpoints: dict[str, bytes | int] = {"f2": pod.bus.out.encode(), "f4": pod.bus.out_replay.encode()}
    assert await pod.unary(SOURCES) == message(f1=message(f1=b"zmq", **endpoints, **rest))
    assert pod.stats.calls == {"answered": 1}


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("/openengine.v1.Control/GetKvEventSources", source(0)),
        ("/sglang.runtime.v1.SglangService/GetServerInfo", server_info(dp_size=1)),
    ],
)
async def test_the_grpc_front_changes_answers_of_openengine_and_sglang(
    pod: GrpcPod, method: str, answer: bytes
) -> None:
    pod.api.answers[method] = answer
    said = await pod.unary(method)
    assert b"5557" not in said
    assert pod.stats.calls == {"answered": 1}


async def test_the_grpc_front_does_not_answer_for_sglang_without_the_method(pod: GrpcPod) -> None:
    with pytest.raises(aio.AioRpcError) as raised:
        await pod.unary("/sglang.runtime.v1.SglangService/GetServerInfo")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert pod.stats.calls == {"passed": 1}


async def test_the_grpc_front_forwards_a_refusal_of_the_engine(pod: GrpcPod) -> None:
    pod.api.answers[SOURCES] = grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(aio.AioRpcError) as raised:
        await pod.unary(SOURCES)
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert pod.stats.calls == {"passed": 1}


async def test_a_rank_that_kvbus_does_not_read_is_an_error(pod: GrpcPod) -> None:
    pod.api.answers[SOURCES] = source(0) + source(1)
    with pytest.raises(aio.AioRpcError) as raised:
        await pod.unary(SOURCES)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == (
        "kvbus cannot say where the events are: the engine publishes rank 1, and kvbus has only these of its ranks: 0"
    )
    assert pod.stats.calls == {"unanswered": 1}


async def test_a_wildcard_endpoint_becomes_the_address_that_the_client_reached() -> None:
    (port,) = free_ports(1)
    async with running_grpc_pod(output={"endpoint": f"tcp://*:{port}", "replay_endpoint": None}) as pod:
        pod.api.answers[SOURCES] = source(0)
        here = message(f2=f"tcp://127.0.0.1:{port}".encode())
        assert await pod.unary(SOURCES) == message(f1=message(f1=b"zmq", f3=b"kv@e", f5=0, **TAIL) + here)
