"""Tests for the conformance kit, which watches and queries correct and defective publishers on real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import zmq
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.common.errors import ExitCode
from kvbus.tools.conform.engine import probes, watch
from kvbus.tools.conform.engine.probes import Target
from kvbus.tools.conform.engine.watch import Watch
from kvbus.tools.conform.report import Outcome
from kvbus.tools.conform.vectors import pack, stored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.conform.engine import Engine, serving
from tests.doubles.bus import PATIENCE, eventually
from tests.ports import free_port, ports_in_a_row

KEPT, BROKEN, NOT_SEEN = Outcome
LOCAL = "tcp://127.0.0.1:0"


@pytest.fixture
def short_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limits of the kit's probes, for engines that never send the awaited answer."""
    monkeypatch.setattr(probes, "TIMEOUT", 1.0)
    monkeypatch.setattr(probes, "SHORT_S", 0.5)
    monkeypatch.setattr(probes, "AT_ONCE_S", 0.6)
    monkeypatch.setattr(watch, "LATE_S", 1.0)


@pytest.fixture
async def publisher() -> AsyncIterator[EnginePublisher]:
    async with EnginePublisher(LOCAL, LOCAL, bind=True) as made:
        yield made


def target(publisher: EnginePublisher, **more: Any) -> Target:
    return Target(publisher.endpoint, publisher.replay_endpoint, **{"seconds": 0.5, **more})


def batch(*events: dict[str, Any]) -> bytes:
    return pack([1.5, list(events), 0])


async def finished(running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(PATIENCE):
        await running


async def watch_publisher(wanted: Target, during: Any = None) -> dict[str, Outcome]:
    """Watch a publisher, and call ``during`` once the watch is connected and knows the next expected seq.

    Return the outcome by clause.
    """
    found = Watch(wanted)
    running = asyncio.ensure_future(found.run())
    if during is not None:
        await eventually(lambda: found.connected and found.judge.stream.expected is not None, "it has the history")
        await during(found)
    await finished(running)
    return outcomes(found)


def outcomes(found: Watch) -> dict[str, Outcome]:
    return {str(each.clause): each.outcome for each in found.report().verdicts}


async def test_an_engine_with_correct_api_and_replay_keeps_its_clauses(publisher):
    engine = Engine(publisher)
    async with serving(engine) as api:
        found = await watch_publisher(target(publisher, api=api, prompts=3))
    assert engine.asked == ["/reset_prefix_cache", "/sleep", "/wake_up"]
    assert {found[each] for each in ("1.1", "1.3", "4.2", "4.3", "6.4", "7.3", "11.1", "11.2")} == {KEPT}


@pytest.mark.usefixtures("short_time_limits")
async def test_the_kit_finds_an_engine_that_sends_no_clear_and_stores_blocks_again(publisher):
    async with serving(Engine(publisher, good=False)) as api:
        found = await watch_publisher(target(publisher, api=api, prompts=3))
    assert {found[each] for each in ("1.3", "4.1", "5.1", "7.3", "11.2")} == {BROKEN}


@pytest.mark.usefixtures("short_time_limits")
async def test_an_api_that_does_not_answer_becomes_a_note(publisher):
    found = Watch(target(publisher, api=f"http://127.0.0.1:{free_port()}"))
    await finished(asyncio.ensure_future(found.run()))
    assert any("prompts through the API" in note for note in found.report().notes)
    assert outcomes(found)["11.2"] is NOT_SEEN


async def test_the_kit_waits_for_a_manual_restart_and_judges_it(publisher):
    publisher.publish(batch(stored(1)))

    async def restart(found: Watch) -> None:
        publisher.publish(batch(stored(2)))
        await eventually(lambda: found.judge.stream.expected == 2, "both batches were seen")
        await asyncio.to_thread(publisher.restart)
        await publisher.wait_for_subscriber(PATIENCE)
        publisher.publish(batch(stored(1)))

    found = await watch_publisher(target(publisher, await_restart=True), restart)
    assert (found["3.3"], found["6.8"], found["3.1"]) == (KEPT, KEPT, KEPT)


@pytest.mark.parametrize("sent", [True, False])
async def test_the_kit_distinguishes_a_lost_batch_from_a_skipped_seq(publisher, sent):
    publisher.publish(batch(stored(1)))

    async def lose(found: Watch) -> None:
        if sent:
            publisher.publish(batch(stored(2)), live=False)
        else:
            publisher.skip()
        for block in (3, 4):
            publisher.publish(batch(stored(block)))

    found = await watch_publisher(target(publisher), lose)
    assert found["3.1"] is (KEPT if sent else BROKEN)


@pytest.mark.usefixtures("short_time_limits")
async def test_a_replay_answer_without_end_is_broken_and_the_watch_ends(publisher):
    publisher.replay_fault = lambda answer: answer[:-1]
    for block in range(3):
        publisher.publish(batch(stored(block)))
    found = await watch_publisher(target(publisher))
    assert found["4.3"] is BROKEN


async def test_long_replay_answers_reach_slow_and_fast_requesters(publisher):
    for block in range(1100):
        publisher.publish(batch(stored(block, size=64)))
    found = await watch_publisher(target(publisher))
    assert {found[each] for each in ("4.3", "4.6", "4.8")} == {KEPT}


class Dropping:
    """A replay server like that of older engines: a ROUTER socket that drops answers at its high-water mark."""

    def __init__(self, count: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 10)
        self._router.setsockopt(zmq.SNDBUF, 4096)
        self._router.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._payload = batch(stored(1, size=1024))
        self._count = count
        self._serving = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        while True:
            await eventually(lambda: self._router.poll(0), "somebody asks")
            peer, *_, start = self._router.recv_multipart()
            if int.from_bytes(start, "big") < self._count:
                for number in range(self._count):
                    self._router.send_multipart([peer, b"", b"", number.to_bytes(8, "big"), self._payload])
                    if number % 8 == 7:
                        await asyncio.sleep(0.001)
            self._router.send_multipart([peer, b"", b"", b"\xff" * 8, b""])

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._router.close(0)
        self._context.term()


@pytest.mark.usefixtures("short_time_limits")
async def test_the_kit_finds_a_replay_socket_that_drops_messages_to_a_slow_requester(publisher):
    dropping = Dropping(1500)
    try:
        publisher.publish(batch(stored(1)))
        found = await watch_publisher(Target(publisher.endpoint, dropping.endpoint, seconds=0.5))
    finally:
        await dropping.close()
    # On a busy machine, the socket also drops answers to fast requesters, which see a gap in their answer then.
    assert BROKEN in {found["4.3"], found["4.4"]}


@pytest.mark.usefixtures("short_time_limits")
async def test_the_kit_finds_a_publisher_that_disconnects_clients_without_a_pong():
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 100)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 300)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        found = await watch_publisher(Target(f"tcp://127.0.0.1:{port}", seconds=3.0))
    finally:
        socket.close(0)
        context.term()
    assert found["1.5"] is BROKEN


async def test_a_wrong_socket_type_is_broken_and_a_dead_port_is_not_tried():
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        found = Watch(Target(f"tcp://127.0.0.1:{port}", seconds=0.5))
        await finished(asyncio.ensure_future(found.run()))
    finally:
        socket.close(0)
        context.term()
    assert (outcomes(found)["1.1"], found.report().exit_code()) == (BROKEN, ExitCode.FOUND)
    nobody = Watch(Target(f"tcp://127.0.0.1:{free_port()}", seconds=0.5))
    await finished(asyncio.ensure_future(nobody.run()))
    assert nobody.report().exit_code() is ExitCode.UNAVAILABLE
    assert "nothing listens" in nobody.report().notes[0]


async def test_the_kit_watches_an_engine_that_connects_to_it(publisher):
    port = free_port()
    found = Watch(Target(f"tcp://127.0.0.1:{port}", bind=True, seconds=600.0))
    running = asyncio.ensure_future(found.run())
    async with EnginePublisher(f"tcp://127.0.0.1:{port}", None, bind=False) as dialling:
        await dialling.wait_for_subscriber(PATIENCE)
        dialling.publish(batch(stored(1)))
        await eventually(lambda: found.judge.batches, "the batch is here")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert outcomes(found)["6.4"] is KEPT


def test_conform_engine_refuses_a_malformed_endpoint():
    done = CliRunner().invoke(main, ["conform", "engine", "tcp://127.0.0.1"])
    assert done.exit_code == 2, done.output
    assert "tcp://127.0.0.1" in done.output


async def test_conform_engine_judges_each_rank_separately_at_its_port():
    live, replay = ports_in_a_row(2), ports_in_a_row(2)
    command = ["conform", "engine", f"tcp://127.0.0.1:{live}", "--replay-endpoint", f"tcp://127.0.0.1:{replay}"]
    async with AsyncExitStack() as stack:
        for rank in range(2):
            endpoints = (f"tcp://127.0.0.1:{port + rank}" for port in (live, replay))
            made = await stack.enter_async_context(EnginePublisher(*endpoints, bind=True))
            made.publish(batch(stored(1)))  # the batches of both engines name rank 0
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvbus", *command, "--ranks", "2", "--seconds", "0.5", "--json"),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 1
    found = {(each["clause"], each["case"]): each["outcome"] for each in json.loads(out)["verdicts"]}
    assert {found[each, "rank 0"] for each in ("1.2", "4.2", "6.4", "10.1")} == {KEPT}
    assert {found[each, "rank 1"] for each in ("4.2", "6.4")} == {KEPT}
    assert {found[each, "rank 1"] for each in ("1.2", "10.1")} == {BROKEN}


@pytest.mark.parametrize("more", [["--api", "http://127.0.0.1:1"], ["--replay-endpoint", "tcp://127.0.0.1:65535"]])
def test_conform_engine_refuses_ranks_with_an_api_or_without_enough_ports(more):
    done = CliRunner().invoke(main, ["conform", "engine", "tcp://127.0.0.1:5557", "--ranks", "2", *more])
    assert done.exit_code == 2, done.output


async def test_conform_engine_prints_its_verdicts_after_ctrl_c(publisher):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvbus", "conform", "engine", publisher.endpoint, "--seconds", "600", "--json"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await publisher.wait_for_subscriber(PATIENCE)
        process.send_signal(signal.SIGINT)
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = json.loads(out)
    assert found["tried"]
    assert {each["clause"]: each["outcome"] for each in found["verdicts"]}["1.1"] == "kept"


@pytest.mark.parametrize(("limit", "numbers"), [(None, 400), (4096, 400), (256, 62)])
async def test_the_kits_prompts_stay_below_the_models_limit(publisher, limit, numbers):
    engine = Engine(publisher, limit=limit)
    async with serving(engine) as api:
        await watch_publisher(target(publisher, api=api, prompts=1))
    assert {len(prompt.split()) for prompt in engine.prompts} == {numbers}
    assert all(len(prompt) < (limit or 2048) for prompt in engine.prompts)  # a token has at most one character here
