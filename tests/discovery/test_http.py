"""Tests for discovery by an engine's HTTP API.

They use answers of released engines, and an engine that restarts at other ports.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvbus.parts.discovery.contract import DiscoveryError, Publisher, Services
from kvbus.parts.discovery.engine_answers import of_sglang, of_vllm
from kvbus.parts.discovery.http import HttpDiscoverer, HttpSettings
from tests.discovery.fleet import DiscoveringBus, Worker, running
from tests.discovery.worlds import Address, HttpWorld
from tests.doubles.bus import eventually

HOST = "10.0.0.3"

# The answer of vllm/config/kv_events.py in vLLM 0.33, as FastAPI formats it. The ports result from `tcp://*:0`.
VLLM_033 = {
    "0": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://10.0.0.3:40123",
        "replay_endpoint": "tcp://10.0.0.3:40124",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv",
    },
    "1": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://10.0.0.3:40125",
        "replay_endpoint": "tcp://10.0.0.3:40126",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv",
    },
}
VLLM_LIST = [{"data_parallel_rank": 0, "endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": None, "topic": ""}]
SGLANG_023 = {
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 64,
        "dp_size": 2,
        "replay_endpoint_port_base": 5600,
    },
    "version": "0.5.23",
}
LOCAL = {"dp_rank": 3, "endpoint": "tcp://127.0.0.1:5560", "topic": "", "block_size": 16}


def test_vllms_answer_may_map_ranks_to_publishers():
    assert of_vllm(VLLM_033, "gateway") == (
        (
            Publisher(0, "tcp://10.0.0.3:40123", "tcp://10.0.0.3:40124"),
            Publisher(1, "tcp://10.0.0.3:40125", "tcp://10.0.0.3:40126"),
        ),
        "kv",
        (),
    )


@pytest.mark.parametrize("answer", [VLLM_LIST, {"sources": VLLM_LIST}])
def test_vllms_answer_may_be_a_list_of_publishers(answer):
    assert of_vllm(answer, HOST) == ((Publisher(0, "tcp://10.0.0.1:5557", None),), "", ())


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "127.0.0.1", "localhost"])
def test_wildcard_and_loopback_endpoints_mean_the_host_of_the_api(host):
    (publisher,), *_ = of_vllm([{"endpoint": f"tcp://{host}:5557"}], HOST)
    assert publisher == Publisher(0, "tcp://10.0.0.3:5557", None)
    (publisher,), *_ = of_vllm([{"endpoint": f"tcp://{host}:5557"}], "fd00::1")
    assert publisher.endpoint == "tcp://[fd00::1]:5557"


def test_discovered_ranks_are_in_numeric_order():
    answer = {
        "10": {"endpoint": "tcp://a:3"},
        "2": {"endpoint": "tcp://a:2"},
        "1": {"publisher": "null", "endpoint": "x"},
    }
    ranks, *_ = of_vllm(answer, HOST)
    assert [publisher.rank for publisher in ranks] == [2, 10]


def test_ranks_with_different_topics_have_no_common_topic():
    answer = [{"data_parallel_rank": n, "endpoint": "tcp://a:1", "topic": f"t{n}"} for n in (0, 1)]
    assert of_vllm(answer, HOST)[1] is None


@pytest.mark.parametrize("answer", [{}, [], {"sources": []}])
def test_vllm_without_publishers_has_no_ranks(answer):
    assert of_vllm(answer, HOST) == ((), None, ())


def test_each_rank_of_sglang_has_its_own_port():
    assert of_sglang(SGLANG_023, HOST) == (
        (
            Publisher(0, "tcp://10.0.0.3:5557", "tcp://10.0.0.3:5600"),
            Publisher(1, "tcp://10.0.0.3:5558", "tcp://10.0.0.3:5601"),
        ),
        "kv",
        (),
    )


def test_each_rank_of_sglang_has_its_replay_on_its_own_host():
    """Ranks of an SGLang engine are on different hosts. kvbus requests each rank's replay from the rank's own host."""
    publishers = [{"dp_rank": 1, "endpoint": "tcp://10.0.0.9:5558"}]
    answer = {"kv_events": {**SGLANG_023["kv_events"], "publishers": publishers}}  # type: ignore[dict-item]
    ranks, *_ = of_sglang(answer, HOST)
    assert ranks[1] == Publisher(1, "tcp://10.0.0.9:5558", "tcp://10.0.0.9:5601")
    assert ranks[0].endpoint == "tcp://10.0.0.3:5557"


def test_an_sglang_node_may_describe_only_its_own_rank():
    assert of_sglang({"kv_events": None, "kv_event_sources": [LOCAL]}, HOST)[0] == (
        Publisher(3, "tcp://10.0.0.3:5560", None),
    )


def test_an_sglang_node_gives_only_its_own_ranks():
    """An SGLang node gives kvbus only its own ranks. ``dp_size`` in its answer counts the ranks of all nodes."""
    of_all_nodes = {**SGLANG_023["kv_events"], "dp_size": 4}  # type: ignore[dict-item]
    here = [
        {"dp_rank": rank, "endpoint": f"tcp://10.0.0.3:{5557 + rank}", "topic": "kv", "block_size": 64}
        for rank in (2, 3)
    ]
    assert of_sglang({"kv_events": of_all_nodes, "kv_event_sources": here, "dp_size": 4}, HOST) == (
        (
            Publisher(2, "tcp://10.0.0.3:5559", "tcp://10.0.0.3:5602"),
            Publisher(3, "tcp://10.0.0.3:5560", "tcp://10.0.0.3:5603"),
        ),
        "kv",
        (),
    )
    replays = [{**each, "replay_endpoint": f"tcp://*:{5800 + each['dp_rank']}"} for each in here]  # type: ignore[operator]
    ranks, *_ = of_sglang({"kv_events": of_all_nodes, "kv_event_sources": replays}, HOST)
    assert [each.replay_endpoint for each in ranks] == ["tcp://10.0.0.3:5802", "tcp://10.0.0.3:5803"]


def test_sglang_without_publishers_has_no_ranks():
    assert of_sglang({"kv_events": None}, HOST) == ((), None, ())
    assert of_sglang({"kv_events": None, "kv_event_sources": None}, HOST) == ((), None, ())
    assert of_sglang({**SGLANG_023, "kv_event_sources": []}, HOST) == ((), None, ())


@pytest.mark.parametrize(
    "answer",
    [
        1,
        "x",
        None,
    ],
)
def test_an_invalid_answer_of_vllm_is_refused(answer):
    with pytest.raises(DiscoveryError, match=r"\S"):
        of_vllm(answer, HOST)


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"vllm_config": {}},
        {"kv_events": 1},
        {"kv_events": {"dp_size": "x", "endpoint_port_base": 1}},
        {"kv_events": {"dp_size": 10**9, "endpoint_port_base": 1}},
        {"kv_events": {"dp_size": 1}},
        {"kv_events": None, "kv_event_sources": "tcp://a:1"},
    ],
)
def test_an_invalid_answer_of_sglang_is_refused(answer):
    with pytest.raises(DiscoveryError, match=r"\S"):
        of_sglang(answer, HOST)


@pytest.mark.parametrize(
    ("read", "answer", "key"),
    [
        (of_vllm, [1], "entry [0]"),
        (of_vllm, {"x": 1}, "entry [0]"),
        (of_vllm, {"x": {"endpoint": "tcp://a:1"}}, "entry [0]"),
        (of_vllm, {"-1": {"endpoint": "tcp://a:1"}}, "entry [0]"),
        (of_vllm, [{}], "endpoint of rank 0"),
        (of_vllm, [{"endpoint": "inproc://kv"}], "endpoint of rank 0"),
        (of_vllm, [{"endpoint": "tcp://a:99999"}], "endpoint of rank 0"),
        (of_vllm, [{"endpoint": "tcp://a:1", "replay_endpoint": 5}], "replay_endpoint of rank 0"),
        (of_sglang, {"kv_events": None, "kv_event_sources": [1]}, "entry [0]"),
        (of_sglang, {"kv_events": {"dp_size": 1, "endpoint_port_base": 0}}, "endpoint of rank 0"),
        (
            of_sglang,
            {"kv_events": {"dp_size": 1, "endpoint_port_base": 1, "replay_endpoint_port_base": 0}},
            "replay_endpoint of rank 0",
        ),
    ],
)
def test_a_rank_with_an_invalid_value_is_a_fault(read, answer, key):
    found = read(answer, HOST)
    assert found.publishers == ()
    assert [each.key for each in found.faults] == [key]
    (engine,) = found.engines("workers", "here")
    assert (engine.faults, engine.size) == (found.faults, 1)


def test_the_other_ranks_of_an_engine_are_found_beside_an_invalid_one():
    found = of_vllm({"0": {"endpoint": "tcp://a:1"}, "1": {"endpoint": "tcp://a:99999"}}, HOST)
    assert found.publishers == (Publisher(0, "tcp://a:1"),)
    wrong = "the port must be between 1 and 65535; for example tcp://10.0.0.3:5557"
    assert [str(each) for each in found.faults] == [f"endpoint of rank 1 = 'tcp://a:99999': {wrong}"]
    assert found.engines("workers", "here")[0].labels == ["workers/0"]
    found = of_sglang({"kv_events": {"dp_size": 2, "endpoint_port_base": 65535}}, HOST)
    assert found.publishers == (Publisher(0, "tcp://10.0.0.3:65535"),)
    twice = of_vllm([{"endpoint": "tcp://a:1"}, {"endpoint": "tcp://a:2"}], HOST)
    assert twice.publishers == (Publisher(0, "tcp://a:1"),)
    assert [str(each) for each in twice.faults] == ["entry [1]: an earlier entry has rank 0, too"]


@pytest.mark.parametrize("publishers", [5, True, {"0": {"dp_rank": 0, "endpoint": "tcp://a:1"}}])
def test_sglangs_publishers_must_be_a_list(publishers):
    answer = {"kv_events": {**SGLANG_023["kv_events"], "publishers": publishers}}  # type: ignore[dict-item]
    with pytest.raises(DiscoveryError, match=r"^/server_info: .* is not a list of publishers$"):
        of_sglang(answer, HOST)


def _many(ranks: int) -> list[dict[str, Any]]:
    return [{"dp_rank": rank, "endpoint": f"ipc:///run/{rank}"} for rank in range(ranks)]


@pytest.mark.parametrize(
    ("read", "answer"),
    [
        (of_vllm, _many),
        (of_vllm, lambda ranks: {"sources": _many(ranks)}),
        (of_vllm, lambda ranks: {str(each["dp_rank"]): each for each in _many(ranks)}),
        (of_sglang, lambda ranks: {"kv_event_sources": _many(ranks)}),
        (of_sglang, lambda ranks: {"kv_events": {"endpoint_port_base": 5557, "dp_size": ranks}}),
        (of_sglang, lambda ranks: {"kv_events": {"endpoint_port_base": 5557, "publishers": _many(ranks)}}),
    ],
    ids=["list", "sources", "by rank", "sglang sources", "dp_size", "publishers"],
)
def test_an_answer_with_more_ranks_than_the_maximum_is_refused(read, answer):
    assert len(read(answer(4096), HOST)[0]) == 4096
    with pytest.raises(DiscoveryError, match=r"names 4097 ranks, and the maximum is 4096$"):
        read(answer(4097), HOST)


# -- asked over HTTP -----------------------------------------------------------------------------------------------------


async def first_engines(world: HttpWorld, **more: Any) -> Any:
    settings = HttpSettings.model_validate({**world.settings, **more})
    sets = HttpDiscoverer(settings, Services("workers", 1, asyncio.Event())).watch()
    try:
        return await anext(sets)
    finally:
        await sets.aclose()


async def test_an_engine_api_without_a_known_path_is_reported(tmp_path):
    async with HttpWorld(tmp_path).running() as world:
        with pytest.raises(DiscoveryError, match=r"/v1 has neither /kv_event_sources nor /server_info"):
            await first_engines(world, url=f"{world.settings['url']}/v1")


async def test_an_answer_of_the_engine_that_is_not_json_is_refused(tmp_path):
    async with HttpWorld(tmp_path).running() as world:
        world.answer = None
        with pytest.raises(DiscoveryError, match="None is not a list of publishers"):
            await first_engines(world)
        for text in (b"{", b"[" * 60_000):
            world.answer = text
            with pytest.raises(DiscoveryError, match=r"GET .*/kv_event_sources: "):
                await first_engines(world)


async def test_an_engine_api_without_a_listener_is_reported_with_the_cause(tmp_path):
    with pytest.raises(DiscoveryError, match=r"GET http://127\.0\.0\.1:\d+/kv_event_sources: .*Connect"):
        await first_engines(HttpWorld(tmp_path))


async def test_http_discovery_reads_no_more_than_4_mib_of_an_answer(tmp_path):
    async with HttpWorld(tmp_path).running() as world:
        world.answer = ["x" * 1000] * 5000
        with pytest.raises(DiscoveryError, match="more than 4194304 bytes"):
            await first_engines(world)


async def test_http_discovery_asks_at_once_after_a_lost_connection(tmp_path):
    async with HttpWorld(tmp_path).running() as world:
        one = Worker("workers", 1)
        await one.start()
        world.have({"workers": Address(one.host, *one.ports)})
        async with running(DiscoveringBus({"http": {**world.settings, "interval": 1000}})) as bus:
            await bus.sources("workers")
            await eventually(lambda: bus.source("workers").sequencer.next > 3, "some batches")
            again = Worker("workers", 2)
            await again.start()
            world.have({"workers": Address(again.host, *again.ports)})
            await one.stop()
            await eventually(lambda: bus.stats.changes["moved"], "the move")
            await bus.exact(again)
            assert bus.daemon.config.sources[0].api == world.settings["url"]
            await again.stop()
