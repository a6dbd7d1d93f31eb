"""Tests for the event endpoints that the front offers to routers. The front determines them again for each request."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from kvbus.config import load
from kvbus.config.front import Front
from kvbus.parts.front.answers import Offer, UnanswerableError
from kvbus.parts.front.server import offers
from tests.discovery.test_http import SGLANG_023, VLLM_LIST
from tests.front.pod import running_pod

HOST = "10.0.0.9"


class BusState:
    """A configuration, and those of its sources that exist in the running kvbus: the given slots, or all of them."""

    def __init__(self, *slots: int, **overrides: Any) -> None:
        front = {"listen": "127.0.0.1:0", "engine": "http://127.0.0.1:1", **overrides.pop("front", {})}
        self.config = load(None, env={}, overrides={"front": front, **overrides})
        streams = {stream.index: stream for stream in self.config.streams()}
        self.streams = {slot: streams[slot] for slot in slots or streams}
        assert self.config.front is not None
        self.front: Front = self.config.front

    def offers(self) -> Any:
        return offers(self, self.front, HOST)


LIVE = {"name": "x", "endpoint": "tcp://*:5657"}
SEVERAL: list[dict[str, Any]] = [
    {"name": "a", "endpoint": "ipc:///a"},
    {"name": "b", "endpoint": "ipc:///b", "data_parallel_size": 2},
]


def test_the_front_offers_each_rank_the_endpoints_of_its_slot():
    outputs = [LIVE, {"name": "y", "endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7100"}]
    observed = BusState(sources=SEVERAL, outputs=outputs, front={"source": "b", "output": "y"})
    assert observed.offers() == {
        0: Offer("tcp://*:7001", "tcp://*:7101", None, HOST),
        1: Offer("tcp://*:7002", "tcp://*:7102", None, HOST),
    }


@pytest.mark.parametrize(
    ("output", "topics"),
    [
        (LIVE, [None, None]),
        ({**LIVE, "profile": "vllm-router"}, ["", ""]),
        ({"topic": "kv@{source}/{rank}", "layout": "per_topic", "endpoint": "tcp://*:7000"}, ["kv@b/0", "kv@b/1"]),
    ],
)
def test_the_front_offers_the_topic_under_which_kvbus_sends(output: dict[str, Any], topics: list[str | None]):
    observed = BusState(sources=[SEVERAL[1]], outputs=[output])
    assert [offer.topic for _, offer in sorted(observed.offers().items())] == topics


def test_the_front_does_not_offer_a_source_that_does_not_exist():
    observed = BusState(1, sources=SEVERAL, outputs=[LIVE], front={"source": "b"})
    assert list(observed.offers()) == [0]
    observed = BusState(0, sources=SEVERAL, outputs=[LIVE], front={"source": "b"})
    with pytest.raises(UnanswerableError, match="does not know yet where the engine publishes"):
        observed.offers()


def test_the_front_needs_a_source_name_if_it_finds_two_engines():
    observed = BusState(sources=[SEVERAL[0]], outputs=[LIVE])
    both = BusState(sources=SEVERAL, outputs=[LIVE], front={"source": "a"})
    observed.config, observed.streams = both.config, both.streams
    with pytest.raises(UnanswerableError, match=r"name this engine's source"):
        observed.offers()


def test_the_front_cannot_offer_one_merged_stream_for_several_ranks():
    observed = BusState(sources=[SEVERAL[0]], outputs=[{"layout": "merged"}])
    both = BusState(sources=SEVERAL, outputs=[{"layout": "merged"}], front={"source": "a"})
    observed.config, observed.streams = both.config, {1: both.streams[1], 2: both.streams[2]}
    with pytest.raises(UnanswerableError, match="one stream for all ranks"):
        observed.offers()


@pytest.mark.parametrize(("front", "host"), [({}, "127.0.0.1"), ({"host": "pod.example"}, "pod.example")])
async def test_the_front_offers_an_address_that_the_client_can_reach(
    front: dict[str, Any], host: str, client: aiohttp.ClientSession
):
    async with running_pod(front) as pod:
        pod.bus.daemon.config = load(
            None,
            env={},
            overrides={
                "front": pod.bus.daemon.config.front,
                "sources": [source.model_dump() for source in pod.bus.daemon.config.sources],
                "outputs": [{"endpoint": "tcp://*:7000", "replay_endpoint": "tcp://0.0.0.0:7001"}],
            },
        )
        pod.api.answers = {"/kv_event_sources": VLLM_LIST, "/server_info": {**SGLANG_023, "big": 2**70}}
        async with client.get(f"{pod.url}/kv_event_sources?x=1") as answer:
            (entry,) = await answer.json()
        assert (entry["endpoint"], entry["replay_endpoint"]) == (f"tcp://{host}:7000", f"tcp://{host}:7001")
        pod.api.answers["/server_info"]["kv_events"] = {**SGLANG_023["kv_events"], "dp_size": 1}  # type: ignore[dict-item]
        async with client.get(f"{pod.url}/server_info") as answer:
            info = await answer.json()
        assert (info["kv_events"]["endpoint_host"], info["kv_events"]["endpoint_port_base"]) == ("*", 7000)
        assert (info["kv_events"]["replay_endpoint_port_base"], info["big"], info["version"]) == (7001, 2**70, "0.5.23")
        assert pod.stats.requests == {"answered": 2}
