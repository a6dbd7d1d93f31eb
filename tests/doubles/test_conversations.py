"""Tests that each double of a router requests and keeps what the real program did in recorded conversations.

``tests/doubles/data/README.md`` says which program and which double belong to a recording.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.doubles import llmd
from tests.doubles.bus import eventually
from tests.doubles.conversation import Line, Speaker, conversations, play, play_to_peer, raw
from tests.doubles.kthena import KthenaSidecar
from tests.doubles.llmd import LlmdWithReplay
from tests.doubles.ping_as_message import PingAsMessage
from tests.doubles.socket_routers import ClearsByPod, NeverAsks
from tests.doubles.stage import Checking, Llmd, Place, Stage, Trusting, UnfinishedError
from tests.ports import free_port
from tests.transport.bare import listening

IDLE = 0.3
COOLDOWN = 2.0
"""Seconds that replace llm-d's 2 s and 30 s."""


def cases(*names: str) -> list[Any]:
    return [pytest.param(lines, id=f"{name}: {title}") for name in names for title, lines in conversations(name)]


async def play_to(router: LlmdWithReplay | NeverAsks, lines: list[Line], speaker: Speaker) -> None:
    """Play a recording to a double that reads all the time, because libzmq needs that to subscribe again."""
    blocks: set[int] = set()

    async def follow() -> None:
        nonlocal blocks
        while True:
            blocks = await router.read_on() if isinstance(router, LlmdWithReplay) else router.read()
            await asyncio.sleep(0.002)

    following = asyncio.ensure_future(follow())
    try:
        await speaker.subscribed()
        await play(lines, speaker, lambda: blocks, lambda _: asyncio.sleep(COOLDOWN))
        assert not following.done()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        router.close()


@pytest.mark.parametrize("lines", cases("llm-d-router"))
async def test_the_double_of_llm_d_with_replay_does_as_llm_d_did(
    lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llmd, "IDLE", IDLE)
    monkeypatch.setattr(LlmdWithReplay, "cooldown", COOLDOWN)
    with Speaker() as speaker:
        await play_to(LlmdWithReplay(speaker.live, speaker.replay), lines, speaker)


@pytest.mark.parametrize("double", [NeverAsks, ClearsByPod])
@pytest.mark.parametrize("lines", cases("llm-d-kv-cache"))
async def test_a_double_that_never_asks_does_as_llm_d_without_replay_did(
    lines: list[Line], double: type[NeverAsks]
) -> None:
    with Speaker() as speaker:
        await play_to(double([speaker.live]), lines, speaker)


@pytest.mark.parametrize("lines", cases("go-zeromq"))
async def test_the_double_that_knows_no_commands_does_as_go_zeromq_did(lines: list[Line]) -> None:
    port = free_port()
    async with listening(port, b"PUB") as peers:
        router = PingAsMessage(f"tcp://127.0.0.1:{port}")
        await eventually(lambda: peers and peers[0].messages, "a subscription")
        end = play_to_peer(lines, peers[0])
        await eventually(lambda: router.hashes() == set(end["held"]), "the blocks")
        assert router.odd == end["odd"]
        assert [name.decode() for name in peers[0].commands] == end["commands"]
        await router.close()


@pytest.mark.parametrize("lines", cases("kthena"))
def test_the_double_of_kthena_does_as_kthena_did(lines: list[Line]) -> None:
    sidecar = KthenaSidecar()
    for line in lines:
        if "sent" in line:
            topic, _, payload = raw(line["sent"])
            with contextlib.suppress(ValueError):  # ValidationError is one, too
                sidecar.take(topic, payload)
        else:
            assert sidecar.blocks.keys() == set(line["held"])


class Recorded(Stage):
    """A stage that answers each replay request as a recording says, and fails if another one comes."""

    def __init__(self, lines: list[Line]) -> None:
        super().__init__([], [])
        self.asked = [line for line in lines if "asked" in line]

    def replay(self, place: Place, start: int, routers: tuple[int, ...] = ()) -> list[tuple[int, bytes]]:
        del place, routers
        assert self.asked, f"a request from {start} that the program did not send"
        line = self.asked.pop(0)
        assert start == int(line["asked"][-1], 16)
        messages = [raw(message)[-2:] for message in line["answer"]]
        batches = [(int.from_bytes(frame, "big"), payload) for frame, payload in messages if payload]
        if len(batches) == len(messages):
            raise UnfinishedError(batches)
        return batches


def play_without_sockets(lines: list[Line], router: Trusting) -> None:
    """Play a recording to a double of `tests.doubles.stage`."""
    stage = Recorded(lines)
    router.connect(stage)
    stuck = False
    for line in lines:
        if "sent" in line and not stuck:
            _, seq, payload = raw(line["sent"])
            try:
                router.receive(stage, int.from_bytes(seq, "big"), payload)
            except UnfinishedError as error:
                stuck = True  # Dynamo's indexer waits for END, and reads nothing more
                for batch in error.batches:
                    router.views.take(batch[1])
        elif "cut" in line:
            router.cut(stage)
            router.connect(stage)
        elif "pause" in line and isinstance(router, Llmd):
            router.now += line["pause"]
        elif "held" in line:
            assert {block for *_, block in router.views.blocks} == set(line["held"])
    assert not stage.asked


@pytest.mark.parametrize("lines", cases("llm-d-router"))
def test_the_double_of_llm_d_without_sockets_does_as_llm_d_did(lines: list[Line]) -> None:
    play_without_sockets(lines, Llmd())


@pytest.mark.parametrize("lines", cases("llm-d-kv-cache"))
def test_the_double_that_applies_every_batch_does_as_llm_d_without_replay_did(lines: list[Line]) -> None:
    play_without_sockets(lines, Trusting())


@pytest.mark.parametrize("lines", cases("dynamo"))
def test_the_double_that_checks_seqs_does_as_dynamos_indexer_did(lines: list[Line]) -> None:
    play_without_sockets(lines, Checking())
