"""Tests for the front's answers to routers that ask for the event endpoints.

The answers are those of released engines, with kvbus's endpoints instead of the engine's. Routers must find kvbus's
endpoints in them.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.parts.discovery.contract import DiscoveryError, Publisher
from kvbus.parts.discovery.engine_answers import of_sglang as read_of_sglang
from kvbus.parts.discovery.engine_answers import of_vllm as read_of_vllm
from kvbus.parts.front.answers import Offer, of_kvbus, of_sglang, of_vllm
from tests.discovery.test_http import LOCAL, SGLANG_023, VLLM_033, VLLM_LIST

HOST = "10.0.0.9"


def offers(
    *ranks: int, host: str = HOST, at: str = "tcp://*", replay: bool = True, topic: str | None = ""
) -> dict[int, Offer]:
    """Return the endpoints that kvbus offers for ranks: rank r has port 6000 + r, and its replay has port 7000 + r."""
    return {
        rank: Offer(f"{at}:{6000 + rank}", f"{at}:{7000 + rank}" if replay else None, topic, host) for rank in ranks
    }


def kvbus_publishers(*ranks: int, replay: bool = True) -> tuple[Publisher, ...]:
    return tuple(
        Publisher(rank, f"tcp://{HOST}:{6000 + rank}", f"tcp://{HOST}:{7000 + rank}" if replay else None)
        for rank in ranks
    )


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("answer", [VLLM_033, VLLM_LIST, {"sources": VLLM_LIST}])
def test_the_front_names_kvbus_in_vllms_answer(answer: Any, replay: bool) -> None:
    ranks = (0, 1) if answer is VLLM_033 else (0,)
    got = of_vllm(answer, offers(0, 1, replay=replay))
    assert read_of_vllm(got, "nobody") == (kvbus_publishers(*ranks, replay=replay), "", ())
    assert type(got) is type(answer)


def test_the_front_keeps_the_rest_of_vllms_answer() -> None:
    answer = {"0": VLLM_033["0"], "1": {"publisher": "null", "endpoint": "tcp://*:1"}}
    got = of_vllm(answer, offers(0, topic=None))
    assert got["1"] == answer["1"]
    own = {"endpoint": f"tcp://{HOST}:6000", "replay_endpoint": f"tcp://{HOST}:7000"}
    assert got["0"] == {**VLLM_033["0"], **own}
    assert answer["0"] is VLLM_033["0"]


def test_the_front_makes_an_answer_for_an_engine_without_the_path() -> None:
    assert read_of_vllm(of_kvbus(offers(1, 0)), "nobody") == (kvbus_publishers(0, 1), "", ())


@pytest.mark.parametrize("replay", [True, False])
def test_the_front_names_kvbus_in_sglangs_answer(replay: bool) -> None:
    """The host in the answer stays a wildcard, which for a router means the host in the worker's URL."""
    got = of_sglang(SGLANG_023, offers(0, 1, replay=replay))
    assert got["kv_events"]["endpoint_host"] == "*"
    assert read_of_sglang(got, HOST) == (kvbus_publishers(0, 1, replay=replay), "", ())
    assert {**got, "kv_events": None} == {**SGLANG_023, "kv_events": None}
    assert got["kv_events"]["block_size"] == 64


def test_the_front_replaces_every_endpoint_in_sglangs_answer() -> None:
    many = {
        "kv_events": {**SGLANG_023["kv_events"], "publishers": [{"dp_rank": 1, "endpoint": "tcp://10.0.0.4:5558"}]},  # type: ignore[dict-item]
        "kv_event_sources": [LOCAL],
    }
    got = of_sglang(many, offers(0, 1, 3, at="tcp://10.0.0.9"))
    assert got["kv_events"]["publishers"] == [
        {"dp_rank": 1, "endpoint": f"tcp://{HOST}:6001", "replay_endpoint": f"tcp://{HOST}:7001", "topic": ""}
    ]
    assert got["kv_event_sources"][0]["endpoint"] == f"tcp://{HOST}:6003"
    assert read_of_sglang(got, "nobody") == (
        kvbus_publishers(3),
        "",
        (),
    )  # the list determines the ranks, not `dp_size`


def test_an_engine_without_a_number_of_ranks_has_one_rank() -> None:
    got = of_sglang({"kv_events": {**SGLANG_023["kv_events"], "dp_size": 0}}, offers(0))  # type: ignore[dict-item]
    assert got["kv_events"]["endpoint_port_base"] == 6000


@pytest.mark.parametrize("ranks", [(0, 1), (2, 3)])
def test_the_front_of_one_of_several_nodes_names_only_its_own_ranks(ranks: tuple[int, ...]) -> None:
    """For one of several nodes, the front's answer has only the ranks of this node, as kvbus has no others.

    ``dp_size`` in the engine's answer counts the ranks of all nodes.
    """
    listed = [{**LOCAL, "dp_rank": rank} for rank in ranks]
    described = {**SGLANG_023["kv_events"], "dp_size": 4}  # type: ignore[dict-item]
    got = of_sglang({"kv_events": described, "kv_event_sources": listed}, offers(*ranks))
    assert [each["endpoint"] for each in got["kv_event_sources"]] == [f"tcp://{HOST}:{6000 + rank}" for rank in ranks]
    assert (got["kv_events"]["dp_size"], got["kv_events"]["endpoint_port_base"]) == (4, 6000)
    assert read_of_sglang(got, HOST) == (kvbus_publishers(*ranks), "", ())


@pytest.mark.parametrize("answer", [{"version": "0.5.23"}, {"kv_events": None}, {"kv_event_sources": []}, [], "x"])
def test_the_front_does_not_change_an_answer_without_event_endpoints(answer: Any) -> None:
    assert of_sglang(answer, offers(0)) is answer


@pytest.mark.parametrize(
    ("read", "answer", "have", "wrong"),
    [
        (of_vllm, "x", offers(0), "not a list of publishers: 'x'"),
        (of_vllm, [3], offers(0), "3 is not a JSON object"),
        (of_vllm, {"0": 3}, offers(0), "3 is not a JSON object"),
        (of_vllm, {"x": {}}, offers(0), "'x' is not a rank"),
        (of_vllm, [{"data_parallel_rank": 4}], offers(0, 1), "rank 4, and kvbus has only these of its ranks: 0, 1"),
        (of_vllm, VLLM_033, offers(0), "rank 1, and kvbus has only these of its ranks: 0"),
        (of_sglang, {"kv_events": 3}, offers(0), "3 is not a JSON object"),
        (of_sglang, {"kv_events": {"dp_size": "x"}}, offers(0), "'x' is not a rank, a number of ranks or a port"),
        (of_sglang, SGLANG_023, offers(0), "rank 1, and kvbus has only these of its ranks: 0"),
        (of_sglang, SGLANG_023, {**offers(0), 1: offers(2)[2]}, r"port of rank r is the base port \+ r, but kvbus has"),
        (of_sglang, SGLANG_023, {**offers(0), 1: offers(1, topic="b")[1]}, "one topic for all ranks"),
    ],
)
def test_the_front_refuses_an_answer_in_which_it_cannot_name_kvbus(
    read: Any, answer: Any, have: Any, wrong: str
) -> None:
    with pytest.raises(DiscoveryError, match=wrong):
        read(answer, have)
