"""Tests for discovery over gRPC of an SGLang engine with several nodes, each of which answers for its own ranks.

The server is SGLang's own if its wheel was extracted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from kvbus.parts.discovery.contract import DiscoveryError, Engine, Publisher, Services
from kvbus.parts.discovery.grpc import GrpcDiscoverer, GrpcSettings
from tests.doubles.bus import running_bus
from tests.front.grpc_pod import message
from tests.ports import free_ports

PROGRAM = Path(__file__).with_name("sglang_node.py")
METHOD = "/sglang.runtime.v1.SglangService/GetServerInfo"
# SGLang 0.5.23 describes itself so (describe_kv_events_publisher): dp_size counts the ranks of all nodes.
DESCRIBED = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "",
    "block_size": 64,
    "dp_size": 4,
    "replay_endpoint_port_base": 5600,
}


def library() -> str:
    """The path of SGLang's gRPC library for this Python. Skip the test without one."""
    home = os.environ.get("TEST_ENGINES_HOME")
    if home is None:
        pytest.skip("TEST_ENGINES_HOME names no engines: .ci/engines.sh DIR")
    name = f"_grpc.cpython-{sys.version_info.major}{sys.version_info.minor}-x86_64-linux-gnu.so"
    found = sorted(Path(home).glob(f"sglang-*/sglang/srt/rust_extensions/{name}"))
    if not found:
        pytest.skip(f"no release of SGLang in {home} has {name}")
    return str(found[-1])


def info(*ranks: int, described: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a node's description of itself with these ranks, in the form of SGLang 0.5.23's
    ``describe_local_source``.
    """
    sources = [
        {
            "dp_rank": rank,
            "endpoint": f"tcp://127.0.0.1:{5557 + rank}",
            "topic": "",
            "block_size": 64,
            "replay_endpoint": f"tcp://127.0.0.1:{5600 + rank}",
        }
        for rank in ranks
    ]
    return {"kv_events": described or DESCRIBED, "kv_event_sources": sources, "version": "0.5.23"}


@contextlib.asynccontextmanager
async def node(port: int, said: dict[str, Any]) -> AsyncIterator[None]:
    words = (str(PROGRAM), library(), str(port), json.dumps(said))
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=asyncio.subprocess.PIPE)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 30)


async def first_engines(*ports: int, patience: float = 30) -> tuple[Engine, ...]:
    """Return the first engines that gRPC discovery finds. The nodes may still be starting."""
    settings = GrpcSettings(nodes=tuple(f"127.0.0.1:{port}" for port in ports))
    end = asyncio.get_running_loop().time() + patience
    while True:
        discoverer = GrpcDiscoverer(settings, Services("sglang", 1, asyncio.Event()))
        async with contextlib.aclosing(discoverer.watch()) as sets:
            try:
                return await anext(sets)
            except DiscoveryError as error:
                if "UNAVAILABLE" not in str(error) or asyncio.get_running_loop().time() > end:
                    raise
        await asyncio.sleep(0.05)


async def test_an_engine_has_the_ranks_of_all_its_nodes():
    first, second = free_ports(2)
    async with node(first, info(0, 1)), node(second, info(2, 3)):
        (engine,) = await first_engines(first, second)
    assert (engine.name, engine.topic) == ("sglang", "")
    assert engine.publishers == tuple(
        Publisher(rank, f"tcp://127.0.0.1:{5557 + rank}", f"tcp://127.0.0.1:{5600 + rank}") for rank in range(4)
    )


async def test_a_node_without_publishers_adds_no_rank():
    first, second = free_ports(2)
    async with node(first, info(0)), node(second, info()):
        (engine,) = await first_engines(first, second)
    assert [each.rank for each in engine.publishers] == [0]


async def test_grpc_discovery_refuses_two_nodes_that_name_the_same_rank():
    first, second = free_ports(2)
    async with (
        node(first, {"kv_events": DESCRIBED}),
        node(second, {"kv_events": {**DESCRIBED, "endpoint_port_base": 1}}),
    ):
        with pytest.raises(DiscoveryError, match=r"rank 0 is at tcp://127\.0\.0\.1:5557 and at tcp://127\.0\.0\.1:1"):
            await first_engines(first, second)


async def test_grpc_discovery_fails_while_a_node_is_down():
    first, second = free_ports(2)
    async with node(first, info(0, 1)):
        with pytest.raises(DiscoveryError, match=f"127.0.0.1:{second}: UNAVAILABLE"):
            await first_engines(first, second, patience=1)


async def test_the_grpc_front_of_a_node_names_only_endpoints_of_its_own_ranks():
    """kvbus's API proxy before one of two nodes names kvbus's endpoint for this node's only rank, which is rank 1."""
    engine_port, front_port = free_ports(2)
    front = {"listen": f"127.0.0.1:{front_port}", "engine": f"127.0.0.1:{engine_port}"}
    async with node(engine_port, info(1, described={**DESCRIBED, "dp_size": 2})):
        await first_engines(engine_port)
        source = {"name": "sglang", "discover": {"grpc": {"nodes": [f"127.0.0.1:{engine_port}"]}}}
        output = {"layout": "merged"}
        async with running_bus(front_grpc=front, sources=[source], output=output) as bus:
            async with aio.insecure_channel(f"127.0.0.1:{front_port}") as channel:
                answer = b""
                while not answer:
                    with contextlib.suppress(aio.AioRpcError):
                        answer = await channel.unary_unary(METHOD)(b"", timeout=10)
            ours = bus.daemon.config.outputs[0]
    said = json.loads(answer[answer.index(b"{") :])
    (entry,) = said["kv_event_sources"]
    assert (entry["dp_rank"], entry["endpoint"]) == (1, ours.endpoint)
    assert entry["replay_endpoint"] == ours.replay_endpoint
    events, ports = (
        said["kv_events"],
        [int(str(each).rpartition(":")[2]) for each in (ours.endpoint, ours.replay_endpoint)],
    )
    assert events["dp_size"] == 2
    assert [events["endpoint_port_base"] + 1, events["replay_endpoint_port_base"] + 1] == ports
    assert message(f1=json.dumps(said).encode()) == answer
