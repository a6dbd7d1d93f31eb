"""Tests for the Python client that reads a log directly, without an aggregator: it holds the engines' blocks."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from kvbus.client import RouterError, Worker
from kvbus.core.wire.profiles import PROFILES
from kvbus.index.follower import Follower
from kvbus.index.questions import Query
from kvbus.parts.discovery.streams import LogStreams
from kvbus.parts.log_router import LogRouter
from tests.doubles.bus import eventually
from tests.log.fleet import fleet
from tests.log.kinds import found_by

PAGE = Path(__file__).parents[2] / "docs" / "LOG.md"
WORKER = Worker("pod.a.engine.3", 0)


@pytest.fixture
def router(kind, monkeypatch):
    """A function that creates a client (:class:`LogRouter`) of this kind of log. The test opens the client."""

    def make(**more):
        name, keys = found_by(kind, monkeypatch)
        return LogRouter(name, {**keys, **more})

    return make


def known(router):
    """Return the numbers of the engine's blocks that the client finds at the worker when it looks up their prompts."""
    return {block for block in range(1, 200) if WORKER in router.longest_prefix([block] * 16)}


async def holds(router, leaf):
    await leaf.written()
    await eventually(lambda: known(router) == leaf.blocks and len(router) == len(leaf.blocks), "the engine's blocks")
    assert not any(router.refused.values())


@contextlib.asynccontextmanager
async def following(kind, router):
    """Yield a log; the kvbus beside an engine with ten blocks, which writes the log; and a client that has read these
    blocks from the log.
    """
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(10)
        await leaf.written()
        async with router() as found:
            await found.settled()
            assert known(found) == leaf.blocks
            yield log, leaf, found


async def test_a_log_router_has_the_blocks_of_the_engines_without_an_aggregator(kind, router):
    async with following(kind, router) as (log, leaf, found):
        leaf.store(5, gone=4)
        await holds(found, leaf)
        assert found.longest_prefix([999] * 16) == {}
        late = log.leaf(topic="m␟late/engine␟0".encode())
        late.store(7)
        both = {WORKER: 1, Worker("late.engine.0", 0): 1}
        await eventually(lambda: found.longest_prefix([7] * 16) == both, "a stream that began later")
        await late.close()


async def test_a_log_router_loses_no_block_when_writer_and_log_restart(kind, router):
    async with following(kind, router) as (log, leaf, found):
        await leaf.close()
        again = log.leaf()
        again.store(3)
        await holds(found, again)
        await kind.restart()
        again.store(5, gone=2)
        await holds(found, again)


async def test_a_log_router_drops_the_blocks_of_a_silent_writer(kind, router, monkeypatch):
    async with following(kind, router) as (_, leaf, found):
        monkeypatch.setattr(LogStreams, "give_up", 0.5)
        await leaf.close()
        await eventually(lambda: len(found) == 0, "nothing of it")
        assert found.longest_prefix([1] * 16) == {}


async def test_a_reopened_log_router_reads_the_log_again(kind, router):
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(10)
        await leaf.written()
        found = router()
        for gone in (0, 4):
            leaf.store(5, gone=gone)
            await leaf.written()
            async with found:
                assert len(found) == 0
                await found.settled()
                await holds(found, leaf)


async def test_the_example_of_the_documentation_finds_the_workers(kind, capsys, monkeypatch):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(3)
        await leaf.written()
        await names["route"](*found_by(kind, monkeypatch), [[2] * 16, [9] * 16])
    assert capsys.readouterr().out == "pod.a.engine.3 has 1 blocks\nnobody has any\n"


async def test_an_index_answers_queries_from_a_log(kind, router):
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(10)
        await leaf.written()
        follower = Follower({}, logs=[router()])
        await follower.open()
        try:
            await follower.complete()
            block = next(iter(leaf.blocks))
            answer = follower.answer([Query(tokens=[block] * 16), Query(tokens=[999] * 16)])
            (held,) = answer.results[0].matches
            assert (held.source, held.blocks, held.state) == (WORKER.name, 1, "live")
            assert (answer.results[1].matches, answer.incomplete) == ([], [])
            assert [counts for *_, counts in follower.blocks()] == [{"GPU": len(leaf.blocks)}]
        finally:
            await follower.close()


async def test_stores_without_tokens_are_counted(kind, router):
    async with fleet(kind) as log:
        leaf = log.leaf(profile=PROFILES["vllm"].without_tokens())
        leaf.store(2)
        await leaf.written()
        async with router() as found:
            await found.settled()
            assert (len(found), found.tokenless) == (0, 2)


async def test_a_log_router_without_a_matching_stream_is_settled(kind, router):
    async with fleet(kind) as log:
        async with router() as found:
            await found.settled()
            assert len(found) == 0
        leaf = log.leaf()
        leaf.store(3)
        await leaf.written()
        async with router(worker="other*") as found:
            await found.settled()
            assert len(found) == 0
            assert found.lag < 60


async def test_a_log_router_names_the_reason_if_the_log_is_unreachable():
    router = LogRouter("nats", {"endpoint": "tcp://127.0.0.1:9"})
    async with router as found:
        await eventually(lambda: found.unreachable, "a reason")
        assert found.unreachable.startswith("nats://127.0.0.1:9")
        assert found.longest_prefix([1] * 16) == {}


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("pulsar", {}, "the kinds are kafka, nats, redis"),
        ("file", {"path": "/nowhere"}, "not a kind of log"),
        ("kafka", {}, "endpoint"),
        ("kafka", {"endpoint": "tcp://127.0.0.1:9", "topik": "x"}, "topik"),
    ],
)
def test_a_log_router_refuses_invalid_settings(kind, keys, said):
    with pytest.raises(ValueError, match=said):
        LogRouter(kind, keys)


def test_a_closed_log_router_refuses_questions():
    router = LogRouter("nats", {"endpoint": "tcp://127.0.0.1:9"})
    with pytest.raises(RouterError, match="async with"):
        router.longest_prefix([1] * 16)
    with pytest.raises(RouterError, match="async with"):
        _ = router.lag
