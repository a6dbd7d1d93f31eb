"""The scene itself, on real sockets: it comes out exact, and a broken router makes it fail."""

import asyncio
import socket
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.common.errors import BindError
from kvbus.core.wire.schema import BlockRemoved
from kvbus.tools.demo import scene as scenes
from kvbus.tools.demo import stage
from kvbus.tools.demo.engines import CAST
from kvbus.tools.demo.ports import LOOPBACK, PortRun
from kvbus.tools.demo.routers import Feed
from kvbus.tools.demo.run import Lines, perform
from kvbus.tools.demo.scene import Scene
from kvbus.tools.demo.screen import Match
from kvbus.tools.demo.script import Act, Kind
from kvbus.tools.demo.story import Tone


async def play(scene, stop=None):
    written: list[Any] = []
    verdict = await perform(scene, Lines(written.append), stop or asyncio.Event())
    return verdict, written


async def test_it_tells_the_whole_story_and_comes_out_exact():
    scene = Scene(seconds=2, seed=5)
    verdict, written = await play(scene)
    assert verdict.equal, written
    assert not verdict.unsettled
    assert {(item.router, item.source) for item in verdict.comparisons} == {
        (router, source)
        for router in ("router-a", "router-b")
        for source in ("vllm/0", "vllm/1", "sglang/0", "sglang/1")
    }
    assert all(item.blocks for item in verdict.comparisons)
    tones = [line.tone for line in scene.story.lines]
    assert tones.count(Tone.FAULT) == 4  # a loss, a crash, a jumble, a lost tail
    assert tones.count(Tone.BUS) == 5  # and a router that joins
    assert Tone.WRONG not in tones
    assert Tone.DIRECT in tones
    wrong = {item.source: (len(item.missing), len(item.dead)) for item in verdict.direct}
    assert wrong["sglang/0"][0], wrong  # lost batches
    assert wrong["vllm/0"][1], wrong  # the blocks from before the crash
    assert wrong["vllm/1"][1], wrong
    assert written[-1].startswith("verdict: exact: all 8 views")


async def test_it_can_be_ended_in_the_middle_of_a_crash_and_is_exact_then():
    stop, written = asyncio.Event(), []
    scene = Scene(seed=2, script=[Act(0.2, Kind.JOIN), Act(0.4, Kind.CRASH, "vllm"), Act(0.5, Kind.JOIN)])

    def write(line):
        written.append(line)
        if "crashes" in line:
            stop.set()

    verdict = await perform(scene, Lines(write), stop)
    assert verdict.equal, written
    said = [line for line in scene.story.lines if line.tone is not Tone.DIRECT]
    assert [line.tone for line in said][-2:] == [Tone.BUS, Tone.SCENE]
    assert "new epoch" in said[-2].text


async def test_without_faults_the_direct_router_is_right_too():
    """What makes it wrong are the faults, and not how the demo reads for it; SGLang stores no block twice."""
    stop, looks = asyncio.Event(), 0
    small = replace(CAST[1], rates=(60.0, 60.0), blocks=150)

    def write(line):
        nonlocal looks
        looks += " | router-a " in line
        if looks == 2:
            stop.set()

    verdict = await perform(Scene(cast=[small, replace(small, name="another")], script=[]), Lines(write), stop)
    assert verdict.equal
    assert all(item.blocks > 100 for item in verdict.direct), "nothing has been evicted"
    assert [(len(item.missing), len(item.dead)) for item in verdict.direct] == [(0, 0)] * 4


async def test_what_it_shows_while_it_plays():
    scene, stop = Scene(seconds=60), asyncio.Event()
    await scene.open()
    try:
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(scene.play(group, stop))
            async with asyncio.timeout(60):
                while scene.observe().routers[0].blocks < 500:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            screen = scene.observe()
            assert [row.state for row in screen.sources] == ["live"] * 4
            assert [set(row.tiers) for row in screen.sources] == [{"GPU", "CPU"}] * 2 + [{"GPU"}] * 2
            assert screen.sent.batches > 0
            assert [router.joined for router in screen.routers] == [True, False, True]
            assert Match.DIFFERENT not in {cell.match for cell in screen.routers[0].cells}
            # a router that believes in something else is seen at the next look, as soon as nothing is on its way
            scene.routers[0].feeds[0].view.clear()
            scene.routers[0].feeds[0].updates += 1
            async with asyncio.timeout(60):
                while scene.observe().routers[0].match is not Match.DIFFERENT:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            stop.set()
            await playing
            assert await scene.settle() == []
            verdict = scene.verdict()
            await scene.leave()
    finally:
        await scene.close()
    assert [item.equal for item in verdict.comparisons] == [False, True, True, True]
    assert not verdict.equal


def test_a_router_that_ignores_removals_ends_it_with_exit_code_1(monkeypatch):
    take = Feed.take

    def deaf(self, update):
        batch = getattr(update, "batch", None)
        if batch is not None and self.source == "sglang/1":
            batch.events[:] = [event for event in batch.events if not isinstance(event, BlockRemoved)]
        take(self, update)

    monkeypatch.setattr(Feed, "take", deaf)
    monkeypatch.setattr(scenes, "TIMEOUT_S", 1.0)
    # caches so small that they evict within the first second, and an engine that does not start again
    monkeypatch.setattr(stage, "CAST", [replace(each, rates=(30.0, 30.0), blocks=32) for each in CAST])
    done = CliRunner().invoke(main, ["demo", "--seconds", "3"])
    assert done.exit_code == 1, done.output
    assert "router-a sglang/1: " in done.output
    assert "DIFFERENT" in done.output
    assert "dead: GPU" in done.output


async def test_a_port_that_is_taken_meanwhile_costs_another_try(monkeypatch):
    runs, taken = [], []

    class Unlucky(PortRun):
        def __init__(self, count):
            super().__init__(count)
            runs.append(self._next)
            if len(runs) == 1:
                taken.append(socket.create_server((LOOPBACK, self._end - 1)))

    monkeypatch.setattr(stage, "PortRun", Unlucky)
    scene = Scene(seconds=1)
    await scene.open()
    try:
        assert len(runs) == 2
        assert [row.state for row in scene.observe().sources] != []
    finally:
        await scene.close()
        taken[0].close()


async def test_no_ports_at_all_is_an_error(monkeypatch):
    with socket.create_server((LOOPBACK, 0)) as taken:

        class Hopeless:
            def __init__(self, count):
                pass

            def take(self, count):
                return taken.getsockname()[1]

        monkeypatch.setattr(stage, "PortRun", Hopeless)
        with pytest.raises(BindError):
            await Scene(seconds=1).open()
