"""Tests for the engine simulator in every dialect: a simple reader of its batches ends with its true blocks."""

import asyncio
import hashlib
import struct
from itertools import islice
from typing import Any

import msgspec
import pytest

from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.sim.engine import EngineOptions, SimEngine, run
from kvbus.tools.sim.workload import Job, synthetic
from kvbus.transport.client.raw import RawSubscriber
from kvbus.transport.engine.publisher import EnginePublisher
from tests.sim.naive import apply, events_of, truth_of
from tests.typed import there

SMALL = EngineOptions(blocks=300, block_size=16)


def payloads(engine, count=400):
    return [engine.step(now) for now in range(count)] + list(engine.flush(0))


def prefix_hash(tokens):
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()


@pytest.mark.parametrize("name", DIALECTS)
def test_a_reader_that_counts_copies_ends_with_the_engines_blocks(name):
    engine = SimEngine(name, synthetic(1, tenants=2), options=SMALL)
    got = apply(payloads(engine))
    assert got == truth_of(engine.truth())
    assert len(got) > 100


@pytest.mark.parametrize("name", ["vllm-0.10.2", "vllm-0.33"])
def test_an_engine_with_bytes_hashes_sends_hashes_of_32_bytes(name):
    engine = SimEngine(DIALECTS[name].with_hashes("bytes"), synthetic(1), options=SMALL)
    sent = payloads(engine)
    assert all(len(h) == 32 for p in sent for _, f in events_of(p) for h in f.get("block_hashes", ()))
    assert apply(sent) == truth_of(engine.truth())


@pytest.mark.parametrize("name", ["vllm-0.10.2", "vllm-0.33", "sglang-0.5.18", "sglang-0.5.23"])
def test_an_engine_with_tiers_names_the_media_of_its_dialect(name):
    options = EngineOptions(blocks=300, tiers={"CPU": 400, "DISK": 500})
    engine = SimEngine(name, synthetic(1), options=options)
    got = apply(payloads(engine, 600))
    assert got == truth_of(engine.truth())
    assert {medium for _, medium, _ in got} == set(DIALECTS[name].media.values())


def test_an_engine_with_groups_and_resets_sends_clears():
    options = EngineOptions(blocks=300, kinds=("full_attention", "sliding_window"), reset_every=50)
    engine = SimEngine("vllm-0.33", synthetic(1), options=options)
    sent = payloads(engine)
    tags = [tag for payload in sent for tag, _ in events_of(payload)]
    assert tags.count("AllBlocksCleared") > 3
    assert apply(sent) == truth_of(engine.truth())
    assert {(e["group_idx"], e["kind"]) for e in engine.truth()} == {
        (0, "full_attention"),
        (1, "sliding_window"),
    }


def test_the_prefix_hash_of_a_block_covers_its_chain_of_tokens():
    engine = SimEngine("vllm-0.33", synthetic(5), options=SMALL)
    payloads(engine, 100)
    by_hash = {entry["hash"]: entry for entry in engine.truth()}
    for entry in engine.truth():
        chain: list[int] = []
        step: dict[str, Any] | None = entry
        while step is not None:
            chain = step["tokens"] + chain
            step = by_hash.get(step["parent"]) if step["parent"] is not None else None
        if len(chain) % 16 == 0 and (entry["parent"] is None or entry["parent"] in by_hash):
            assert entry["prefix"] == prefix_hash(chain)


def test_vllm_keeps_copies_and_sglang_does_not():
    jobs = [Job(tuple(range(64)), 64)] * 20
    for name, more in (("vllm-0.33", True), ("sglang-0.5.23", False)):
        engine = SimEngine(name, jobs)
        while engine.step(0) is not None:
            pass
        assert any(entry["copies"] > 1 for entry in engine.truth()) is more


def test_an_engine_with_a_finished_workload_keeps_its_blocks():
    engine = SimEngine("vllm-0.33", synthetic(1), options=EngineOptions(requests=3))
    sent = list(iter(lambda: engine.step(1.5), None))
    assert engine.finished == engine.started == 3
    assert engine.step(2) is None
    assert apply(sent) == truth_of(engine.truth())
    assert msgspec.msgpack.decode(sent[0])[0] == 1.5


def test_a_restarted_engine_has_an_empty_cache_and_continues_the_workload():
    engine = SimEngine("sglang-0.5.9", synthetic(1), options=SMALL)
    payloads(engine, 50)
    engine.restart()
    assert engine.truth() == []
    second = payloads(engine, 50)
    assert next(events_of(second[0])) == ("AllBlocksCleared", {})
    assert apply(second) == truth_of(engine.truth())


def test_each_rank_names_itself_in_its_batches():
    engine = SimEngine("vllm-0.33", synthetic(1, 3), rank=3)
    assert msgspec.msgpack.decode(there(engine.step(0)))[2] == 3
    assert {entry["rank"] for entry in engine.truth()} == {3}


def test_the_engine_truncates_prompts_that_exceed_its_pool():
    engine = SimEngine("vllm-0.33", [Job(tuple(range(100_000)), 99_000)], options=EngineOptions(blocks=100))
    sent = list(iter(lambda: engine.step(0), None))
    assert len(apply(sent)) == 50


def test_a_workload_with_only_cache_hits_is_an_error():
    engine = SimEngine("sglang-0.5.9", iter(lambda: Job((1,) * 32, 32), None))
    engine.step(0)
    with pytest.raises(RuntimeError, match="no more events"):
        engine.step(0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vllm-0.9.0", EngineOptions(tiers={"CPU": 9}), "vllm-0.9.0 has no medium for tier CPU"),
        ("vllm-0.18", EngineOptions(kinds=("full_attention", "mamba")), "vllm-0.18 has no group_idx"),
    ],
)
def test_options_that_a_dialect_cannot_express_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        SimEngine(name, [], options=options)


async def test_the_runner_publishes_until_it_is_stopped():
    engine = SimEngine("trtllm", synthetic(1), options=SMALL)
    async with (
        EnginePublisher("tcp://127.0.0.1:*", None) as publisher,
        RawSubscriber(publisher.endpoint) as sub,
    ):
        await publisher.wait_for_subscriber(60)
        stop = asyncio.Event()
        task = asyncio.create_task(run(engine, publisher, stop, rate=5000))
        got = [(await sub.recv())[2] for _ in range(200)]
        stop.set()
        await task
        while len(got) < publisher.next_seq:
            got.append((await sub.recv())[2])
        assert apply(got) == truth_of(engine.truth())


async def test_the_runner_restarts_publisher_and_engine_together():
    engine = SimEngine("vllm-0.33", synthetic(1), options=SMALL)
    async with (
        EnginePublisher("tcp://127.0.0.1:*", None) as publisher,
        RawSubscriber(publisher.endpoint) as sub,
    ):
        stop = asyncio.Event()
        task = asyncio.create_task(run(engine, publisher, stop, rate=500, restart_every=0.05))
        last, lives = -1, 0
        while lives < 2:
            seq = int.from_bytes((await sub.recv())[1], "big")
            lives += seq < last
            last = seq
        stop.set()
        await task


async def test_the_runner_ends_with_the_workload():
    twin, engine = (SimEngine("vllm-0.33", islice(synthetic(1), 1)) for _ in range(2))
    batches = len(list(iter(lambda: twin.step(0), None)))
    async with EnginePublisher("tcp://127.0.0.1:*", None) as publisher:
        await run(engine, publisher, asyncio.Event(), rate=1e6)
        assert publisher.next_seq == batches
