"""The measuring programs measure: every process does its part, and what goes wrong is an error and no result."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest
import zmq

from tests.doubles.router import events_of

from . import asker
from .core import child
from .counters import Counters
from .engine import schedule, window_of
from .loads import LOADS, NUMBERED, SEQUENCE, is_empty, load_named, stamp, stamped, tally
from .recorded import LIVE
from .router import Heard, Listener, Spec
from .setups import BETWEEN, Result, Setup, check_batches, running, with_a_cache
from .turns import alternate
from .workloads import cases


@pytest.mark.parametrize(
    ("load", "batches", "blocks"), [("1x1", 600, 600), ("8x8", 40, 2560), ("8x8-0.33", 40, 2560), ("1x64", 40, 2560)]
)
def test_stores_store_what_their_name_says(load, batches, blocks):
    stored, removed, live = tally(LOADS[load].take(batches))
    assert (stored, removed, len(live)) == (blocks, 0, blocks)


def test_a_mixed_load_keeps_the_cache_full():
    payloads = LOADS["full"].take(4096 // 16 + 200)
    stored, removed, live = tally(payloads)
    assert stored - removed == len(live)
    assert abs(len(live) - 4096) <= 8 * SEQUENCE
    assert removed >= 100 * 8


def test_a_load_of_vllm_0_33_has_its_fields_and_ids_of_one_to_five_bytes():
    events = [event for payload in LOADS["8x8-0.33"].take(40) for event in events_of(payload)]
    assert {len(event) for event in events} == {11}
    assert LOADS["8x8-0.33"].take(1)[0][11:14] == b"\xde\x00\x0b"
    widths = Counter(len(msgspec.msgpack.encode(token)) for event in events for token in event["token_ids"])
    assert widths.keys() == {1, 2, 3, 5}
    assert 0.6 < widths[3] / widths.total() < 0.8


def test_ranks_and_probes_share_no_block():
    seen = [tally(LOADS["8x8"].take(20, rank))[2] for rank in (0, 1)]
    load = LOADS["8x8"]
    seen += [tally([load.probe(number)])[2] for number in (1, 2)] + [tally([load.end()])[2]]
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_a_stamp_changes_nothing_but_the_time():
    payload = LOADS["8x8"].take(1)[0]
    again = stamp(payload, 12.5)
    assert stamped(again) == 12.5
    assert (again[:2], again[10:]) == (payload[:2], payload[10:])
    assert not is_empty(again)
    assert is_empty(b"\x93\xcb" + bytes(8) + b"\x90\x00")


@pytest.mark.parametrize("between", BETWEEN)
def test_all_of_a_load_arrives_through(between):
    with running(Setup(between, "full", 600, routers=2, ranks=2, verify=True)) as processes:
        result = processes.run()
        if between == "kvbus":
            processes.check_kvbus()
            of_the_load = sum(heard.live for heard in result.heard) // 2
            ends = 2
            assert processes.live_blocks() == of_the_load + processes.probes + ends
    stored, removed, live = tally(LOADS["full"].take(600))
    assert [(heard.batches, heard.stored, heard.removed, heard.live) for heard in result.heard] == [
        (600, stored, removed, len(live))
    ] * 4
    assert result.seconds > 0
    assert min(result.cpu.values()) > 0


@pytest.mark.parametrize(
    ("between", "load", "came"),
    [("kvbus", "vllm-map", 98), ("kvbus", "8x8", 100), ("direct", "vllm-map", 100), ("proxy", "1x1", 100)],
)
def test_of_a_recording_nearly_every_batch_leaves_kvbus_and_of_all_else_every_one(between, load, came):
    setup = Setup(between, load, 100)

    def check(batches):
        check_batches(setup, Result(1.0, 100, [Heard(batches=100), Heard(batches=batches)], {}))

    check(came)
    check(100)
    for wrong in (came - 1, 101):
        with pytest.raises(RuntimeError, match=f"batches={wrong}"):
            check(wrong)


def test_a_recorded_load_is_measured_once_its_cache_is_full():
    load = load_named("sglang-map")
    setup = with_a_cache(Setup("kvbus", "sglang-map", 100))
    assert (setup.batches, setup.prefill) == (load.warm + 100, load.warm)
    assert len(tally(load.take(setup.prefill))[2]) >= LIVE


@pytest.mark.parametrize(("size", "window"), [(200, 2000), (2**17, 64), (2**24, 1)])
def test_of_large_batches_fewer_are_under_way(size, window):
    assert window_of(2000, [bytes(size)] * 3) == window
    assert window_of(2000, []) == 2000


def test_a_paced_load_gives_a_latency_for_each_batch():
    with running(Setup("direct", "1x1", 300, rate=1000, prefill=100)) as processes:
        result = processes.run()
    assert len(result.latencies) == 200
    assert 0 < result.latencies[0] < 1
    assert result.seconds > 0.15


def test_clients_are_answered_while_a_load_runs():
    # three seconds: a question is one of some pieces
    setup = Setup("kvbus", "asked:40", 490, ranks=2, rate=150, prefill=40, apart=True)
    with running(setup) as processes:
        kinds: tuple[asker.Kind, ...] = ("probe", "questions", "crowd")
        clients = [processes.asker(asker.Spec(processes.http, kind, setup.load, clients=5)) for kind in kinds]
        for client in clients:
            client.tell("run")
        processes.run()
        asked = [msgspec.convert(client.ask("stop"), asker.Asked, strict=False) for client in clients]
    assert set(asked[0].statuses) == {200}
    assert [set(each.times) for each in asked] == [set(asker.PROBES), {"/query"}, set(asker.CROWD)]
    assert min(each.statuses[200] for each in asked) > 1


def test_ranks_leave_their_batches_together_or_one_after_the_other():
    assert list(schedule(range(5, 7), 2, 10.0, apart=False)) == [(0.0, 5, range(2)), (0.1, 6, range(2))]
    assert list(schedule(range(5, 7), 2, 10.0, apart=True)) == [
        (0.0, 5, range(1)),
        (0.05, 5, range(1, 2)),
        (0.1, 6, range(1)),
        (0.15, 6, range(1, 2)),
    ]


def test_the_prompt_that_is_asked_for_is_of_one_source_and_begins_like_that_of_others():
    stored = [
        {
            block
            for payload in load_named("asked:40").take(50, rank)
            for event in events_of(payload)
            for block in event["block_hashes"]
        }
        for rank in range(3)
    ]
    caches = [2048 + 8 * 40, 32 + 40 + 38 * 48, 32 + 2 * 48 + 37 * 56]  # of different sizes
    assert [len(each) for each in stored] == [each + 10 * 8 for each in caches]
    assert len(stored[0] & stored[1]) == len(stored[0] & stored[1] & stored[2]) == 32
    assert len(asker.prompt("asked:40", "token_ids")) == 16 * asker.BLOCKS


def test_a_filled_cache_goes_on_with_blocks_of_its_own():
    payloads = load_named("filled:5").take(12)
    stored, _, live = tally(payloads)
    assert stored == len(live) == 5 * 64 + 7 * 8


def test_a_request_trace_is_a_load_under_its_file_s_name(tmp_path):
    trace = tmp_path / "two_requests.jsonl"
    request = {"timestamp": 0, "input_length": 1000, "output_length": 32, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(request) + "\n" + json.dumps(request | {"hash_ids": [1, 3]}) + "\n")
    (case,) = (case for case in cases(tmp_path, quick=True) if case.load.startswith("trace:"))
    assert case.name == "two_requests"
    payloads = load_named(case.load).take(case.batches)
    assert payloads == load_named(case.load).take(case.batches)
    # 1,032 tokens are 64 blocks of 16 and a rest; the second request shares the first 32 of them
    assert len(tally(payloads)[2]) == 64 + 32


def test_a_router_counts_what_is_missing_and_what_comes_again(tmp_path):
    Counters(tmp_path / "counters", 2)
    payload = LOADS["1x1"].take(1)[0]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    listener = Listener(context, endpoint, 0, Spec([endpoint], str(tmp_path / "counters")))
    assert publisher.recv() == b"\x01"
    for number, seq in enumerate((7, 8, 11, 11, 12)):
        publisher.send_multipart([b"", seq.to_bytes(8, "big"), stamp(payload, NUMBERED + number)])
    publisher.send_multipart([b"", (13).to_bytes(8, "big"), LOADS["1x1"].end()])
    while not listener.over:
        assert listener.socket.poll(10_000)
        listener.drain()
    context.destroy(0)
    heard = listener.count(())
    assert (heard.batches, heard.missing, heard.went_back) == (5, 2, 1)
    assert Counters(tmp_path / "counters").values[1] == 5


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("cost", "8x8-0.33", 6400), "us_per_block"),
        (("recorded", "vllm-map", 100), "us_per_block"),
        (("memory", "1x1", 20_000, 0), "bytes_per_block"),
        (("scale", 10_000, 12_800, "8x8"), "us_per_operation"),
    ],
)
def test_the_core_is_measured_in_a_process_of_its_own(arguments, found):
    assert child(*arguments)[found] > 0


def test_runs_take_turns():
    order: list[str] = []

    def measured(item: str) -> int:
        order.append(item)
        return len(order)

    found = alternate("a title", 3, ["a", "b"], measured)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
