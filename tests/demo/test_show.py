"""The show on real sockets with a real `kvbus run`: exact with kvbus, wrong without it, and able to fail."""

import asyncio
import io
import socket
from collections import deque

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvbus.client import BlockView, Received
from kvbus.core.wire.schema import BlockRemoved
from kvbus.tools.demo import show as shows
from kvbus.tools.demo.screen import plain_line, play, render, render_verdict
from kvbus.tools.demo.show import Line, Row, Show, Tone, Verdict
from kvbus.tools.demo.stage import Bus, BusError, Engine, Router
from kvbus.tools.terminal import ASCII, UNICODE

SMALL = (("vllm-a", "vllm-0.33", 60.0, 150), ("vllm-b", "vllm-0.33", 60.0, 150), ("sglang", "sglang-0.5.23", 60.0, 150))


async def played(directory, seconds, tell=lambda line: None, stop=None):
    show = Show(seconds, 1, str(directory), tell, stop or asyncio.Event())
    async with asyncio.TaskGroup() as group:
        try:
            return await show.play(group)
        finally:
            await show.close()


async def test_every_fault_is_repaired_and_the_router_without_kvbus_is_wrong(tmp_path):
    story: list[Line] = []
    verdict = await played(tmp_path, 4.0, story.append)
    assert verdict.exact, story
    assert [line.tone for line in story].count(Tone.FAULT) == 3  # a loss, a crash, a kill of kvbus
    assert Tone.WRONG not in {line.tone for line in story}
    said = "\n".join(line.text for line in story)
    for part in ("gap seen", "router-b starts late", "restart seen", "SIGKILL", "caught up", "no router noticed"):
        assert part in said, story
    with_kvbus, late, without = verdict.rows
    assert with_kvbus.blocks == late.blocks == verdict.engine_blocks > 100
    assert (with_kvbus.wrong, late.wrong) == (0, 0)
    assert without.missing > 0
    assert without.dead > 0


async def test_without_faults_the_router_without_kvbus_is_right_too(tmp_path, monkeypatch):
    """Only the faults make it wrong, and not how the demo reads for it."""

    async def nothing(_show, _group):
        pass

    monkeypatch.setattr(shows, "CAST", SMALL)
    monkeypatch.setattr(Show, "_play", nothing)
    removals: list[object] = []
    apply = Router.apply

    def counting(self, name, update):
        if isinstance(update, Received):
            removals.extend(event for event in update.batch.events if isinstance(event, BlockRemoved))
        apply(self, name, update)

    monkeypatch.setattr(Router, "apply", counting)
    verdict = await played(tmp_path, 3.0)
    assert verdict.exact
    assert removals, "nothing has been evicted"
    assert verdict.rows[-1].wrong == 0


async def test_a_router_that_ignores_removals_makes_it_fail(tmp_path, monkeypatch):
    apply = Router.apply

    def deaf(self, name, update):
        if isinstance(update, Received) and name == "sglang":
            update.batch.events[:] = [event for event in update.batch.events if not isinstance(event, BlockRemoved)]
        apply(self, name, update)

    monkeypatch.setattr(Router, "apply", deaf)
    monkeypatch.setattr(shows, "CAST", SMALL)
    monkeypatch.setattr(shows, "REPAIR_SECONDS", 0.5)
    lines: list[str] = []
    console = Console(file=io.StringIO())
    exact = await play(console, lines.append, str(tmp_path), asyncio.Event(), seconds=4.0, seed=0, plain=False)
    assert exact is False
    assert lines[-1] == "verdict: NOT EXACT: a router behind kvbus differs from the engines' caches."
    assert any(line.startswith("verdict: router-a has ") for line in lines)
    assert any("] WRONG: " in line for line in lines)


async def test_a_kvbus_that_cannot_start_is_an_error_that_says_why(tmp_path):
    show = Show(1.0, 0, str(tmp_path), lambda line: None, asyncio.Event())
    port = int(show.bus.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        async with asyncio.timeout(60):
            with pytest.raises(BusError, match=f"kvbus run did not start: .*{port}"):
                await show.bus.start()
    await show.close()


async def test_kvbus_is_down_as_soon_as_it_is_killed(tmp_path):
    bus = Bus([Engine("one", "vllm-0.33", 1.0, 100, 0, str(tmp_path))], str(tmp_path))
    watching = asyncio.ensure_future(bus.watch())
    try:
        for _ in range(2):
            await bus.start()
            assert bus.up
            await bus.kill()
            assert not bus.up
    finally:
        await bus.kill()
        watching.cancel()


VERDICTS = (
    (Verdict((Row("router-a", True, True, 5), Row("no kvbus", False, True, 9, 1, 5)), 5, True), "EXACT: router-a holds the 5 "),
    (Verdict((Row("router-a", True, True, 5), Row("router-b", True, True, 5)), 5, True), "EXACT: router-a and router-b hold "),
    (Verdict((Row("router-a", True, True, 5, 1_000, 2),), 5, False), "NOT EXACT: "),
    (Verdict((Row("router-a", True, True, 5, 1, 0),), 5, None), "No verdict: "),
)  # fmt: skip


@pytest.mark.parametrize(("verdict", "last"), VERDICTS)
def test_the_verdict_in_words(verdict, last):
    *said, end = verdict.sentences()
    assert end.startswith(last)
    for row, sentence in zip([row for row in verdict.rows if row.wrong], said, strict=True):
        who = row.name if row.behind_kvbus else "Without kvbus, a router"
        assert sentence == f"{who} has {row.missing:,} blocks missing and {row.dead:,} dead blocks."
    text = drawn(render_verdict(verdict, UNICODE), 80)
    assert last in text
    assert all(f"{row.blocks:,}" in text for row in verdict.rows)


def drawn(renderable, width):
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable)
    return file.getvalue()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (120, 40), (200, 60)])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
async def test_the_screen_fits_the_terminal(tmp_path, width, height, glyphs):
    show = Show(30.0, 0, str(tmp_path), lambda line: None, asyncio.Event())
    show.rows = [
        Row("router-a", True, True, 123_456),
        Row("router-b", True, False),
        Row("no kvbus", False, True, 123_456, 1_234, 56),
    ]
    show.history["router-a"] = deque([None, 0, 5, 0] * 100)
    show.history["no kvbus"] = deque(range(400))
    story = [Line(float(n), tone, f"line {n} " + "x" * 190) for n, tone in enumerate([*Tone] * 6)]
    text = drawn(render(show, story, width, height, glyphs), width)
    lines = text.splitlines()
    assert len(lines) == height
    assert max(map(cell_len, lines)) <= width
    for word in ("engines", "kvbus", "routers", "123,456", "1,234", "56", "later", "down", "line 29 ", show.bus.url):
        assert word in text
    assert ("line 0 " in text) == (height >= 60)
    assert glyphs is UNICODE or not set(text) & set("▶●▼✓✗▁█·")


async def test_a_router_is_compared_block_by_block(tmp_path):
    show = Show(1.0, 0, str(tmp_path), lambda line: None, asyncio.Event())
    engine = show.engines[0]
    engine.open()
    quiet = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            show.direct.start(group)
            show.late.views = {each.name: BlockView() for each in show.engines}
            serving = group.create_task(engine.serve(quiet))
            second = group.create_task(Subscriptions(engine).follow())
            async with asyncio.timeout(30):
                while show.direct.blocks < 50 or show.direct.wrong(show.engines) != (0, 0):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            quiet.set()
            await serving
            second.cancel()
            async with asyncio.timeout(30):
                while show.direct.wrong(show.engines) != (0, 0):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            held = show.direct.blocks
            assert show.late.wrong(show.engines) == (held, 0)  # it has nothing
            engine.crash()
            assert show.direct.wrong(show.engines) == (0, held)  # the engine has nothing
            await show.direct.stop()
    finally:
        engine.close()


class Subscriptions:
    """A second subscriber, in place of kvbus: an engine waits for two."""

    def __init__(self, engine):
        self._router = Router("second", {engine.name: (engine.endpoint, engine.replay_endpoint)})
        self._engine = engine
        self._router.views = {engine.name: BlockView()}

    async def follow(self):
        await self._router.follow(self._engine.name, self._engine.endpoint, self._engine.replay_endpoint)


def test_a_line_of_the_story_is_plain():
    assert plain_line(Line(1.25, Tone.FAULT, "it rains")) == "[  1.2s] fault: it rains"
