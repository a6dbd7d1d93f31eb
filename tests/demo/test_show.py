"""Tests for the demo on real sockets with a real `kvbus run`.

The routers behind kvbus must end with exactly the engines' blocks, and the router without kvbus must not. Otherwise the
demo reports a failure.
"""

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
from kvbus.tools.demo.show import Show, play, render, render_verdict
from kvbus.tools.demo.stage import Bus, BusError, Engine, Router, Row
from kvbus.tools.terminal import ASCII, UNICODE

SMALL = (("vllm-a", "vllm-0.33", 60.0, 150), ("vllm-b", "vllm-0.33", 60.0, 150), ("sglang", "sglang-0.5.23", 60.0, 150))


def showing(directory, seconds=1.0, story=None):
    story = [] if story is None else story
    return Show(seconds, str(directory), lambda *line: story.append(line), asyncio.Event())


async def played(show):
    """Play the demo. Return whether kvbus's routers were exact, and the numbers of blocks of all routers at the end."""
    async with asyncio.TaskGroup() as group:
        try:
            return await show.play(group), show.rows()
        finally:
            await show.close()


async def test_the_demo_repairs_every_fault_and_the_router_without_kvbus_is_wrong(tmp_path):
    story: list[tuple[str, str]] = []
    show = showing(tmp_path, 4.0, story)
    exact, (with_kvbus, late, without) = await played(show)
    assert exact, story
    assert [who for who, _ in story].count("fault") == 3  # the faults are a loss, a crash, and a kill of kvbus
    assert "WRONG" not in {who for who, _ in story}
    said = "\n".join(text for _, text in story)
    for part in ("saw the gap", "router-b starts late", "saw the restart", "SIGKILL", "caught up", "no router noticed"):
        assert part in said, story
    assert with_kvbus.blocks == late.blocks == sum(len(engine.blocks) for engine in show.engines) > 100
    assert (with_kvbus.wrong, late.wrong) == (0, 0)
    assert without.missing > 0
    assert without.dead > 0


async def test_the_router_without_kvbus_is_exact_if_the_demo_makes_no_faults(tmp_path, monkeypatch):

    async def nothing(*_):
        pass

    monkeypatch.setattr(shows, "CAST", SMALL)
    for act in ("_lose", "_start_late", "_crash", "_kill"):
        monkeypatch.setattr(Show, act, nothing)
    removals: list[object] = []
    apply = Router.apply

    def counting(self, name, update):
        if isinstance(update, Received):
            removals.extend(event for event in update.batch.events if isinstance(event, BlockRemoved))
        apply(self, name, update)

    monkeypatch.setattr(Router, "apply", counting)
    exact, rows = await played(showing(tmp_path, 3.0))
    assert exact
    assert removals, "nothing has been evicted"
    assert rows[-1].wrong == 0


async def test_the_demo_fails_if_a_router_ignores_removals(tmp_path, monkeypatch):
    apply = Router.apply

    def deaf(self, name, update):
        if isinstance(update, Received) and name == "sglang":
            update.batch.events[:] = [event for event in update.batch.events if not isinstance(event, BlockRemoved)]
        apply(self, name, update)

    monkeypatch.setattr(Router, "apply", deaf)
    monkeypatch.setattr(shows, "CAST", SMALL)
    monkeypatch.setattr(shows, "REPAIR_SECONDS", 0.5)
    written = io.StringIO()
    exact = await play(Console(file=written, width=200), str(tmp_path), asyncio.Event(), 4.0)
    assert exact is False
    assert "NOT EXACT: a router behind kvbus differs from the engines' caches." in written.getvalue()
    assert "│ router-a has " in written.getvalue()
    assert "  WRONG     the routers behind kvbus are not exact after 0.5 s" in written.getvalue()


async def test_the_demo_reports_the_reason_if_kvbus_cannot_start(tmp_path):
    show = showing(tmp_path)
    port = int(show.bus.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        async with asyncio.timeout(60):
            with pytest.raises(BusError, match=f"kvbus run did not start: .*{port}"):
                await show.bus.start()
    await show.close()


async def test_an_error_in_the_demo_is_not_raised_as_an_exception_group(tmp_path, monkeypatch):
    async def broken(self):
        raise BusError("broken")

    monkeypatch.setattr(Bus, "start", broken)
    with pytest.raises(BusError, match="broken"):
        await play(Console(file=io.StringIO()), str(tmp_path), asyncio.Event(), 1.0)


async def test_the_demo_shows_kvbus_as_down_after_it_is_killed(tmp_path):
    bus = Bus([Engine("one", "vllm-0.33", 1.0, 100, 0, str(tmp_path))], str(tmp_path))
    try:
        for _ in range(2):
            await bus.start()
            assert bus.sources
            reading = asyncio.ensure_future(bus.read())
            await asyncio.sleep(0)  # let the task send its request
            await bus.kill()
            await reading
            assert not bus.sources
    finally:
        await bus.kill()


VERDICTS = (
    ((Row("router-a", False, 5), Row("router-b", False), Row("no kvbus", True, 9, 1, 5)), True, "EXACT: router-a holds the 5 "),
    ((Row("router-a", False, 5), Row("router-b", False, 5)), True, "EXACT: router-a and router-b hold the 5 "),
    ((Row("router-a", False, 5, 1_000, 2),), False, "NOT EXACT: "),
    ((Row("router-a", False, 5, 1, 0),), None, "No verdict: "),
)  # fmt: skip


@pytest.mark.parametrize(("rows", "exact", "last"), VERDICTS)
def test_the_verdict_of_the_demo_names_each_wrong_router(rows, exact, last):
    text = rendered_text(render_verdict(rows, 5, exact, UNICODE), 80)
    assert f"│ {last}" in text
    for row in rows:
        who = "Without kvbus, a router" if row.direct else row.name
        sentence = f"{who} has {row.missing:,} blocks missing and {row.dead:,} dead blocks."
        assert (sentence in text) == bool(row.wrong)
        assert (row.name in text) == (row.blocks is not None)


def rendered_text(renderable, width):
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
async def test_the_drawing_of_the_demo_fits_the_terminal(tmp_path, monkeypatch, width, glyphs):
    rows = [Row("router-a", False, 123_456), Row("router-b", False), Row("no kvbus", True, 123_456, 1_234, 56)]
    monkeypatch.setattr(Show, "rows", lambda _: rows)
    show = showing(tmp_path, 30.0)
    show.history["router-a"] = deque([None, 0, 5, 0] * 100)
    show.history["router-b"] = deque([None] * 400)
    show.history["no kvbus"] = deque(range(400))
    text = rendered_text(render(show, width, glyphs), width)
    lines = text.splitlines()
    assert len(lines) == 13  # in a terminal of 24 lines, the story fits above the verdict
    assert max(map(cell_len, lines)) <= width
    for word in ("engines", "kvbus", "routers", "123,456", "1,234", "56", "later", "down", show.bus.url):
        assert word in text
    assert text.count(glyphs.levels[-2]) > 4
    assert glyphs is UNICODE or not set(text) & set("▶●▼✓✗▁█·")


async def test_the_demo_compares_a_router_with_the_engine_block_by_block(tmp_path):
    show = showing(tmp_path)
    engine = show.engines[0]
    engine.open()
    quiet = asyncio.Event()
    # A second router takes kvbus's place, because the engine waits for two subscribers.
    second = Router("second", {engine.name: engine.endpoints})
    try:
        async with asyncio.TaskGroup() as group:
            show.direct.start(group)
            second.start(group)
            show.late.views = {each.name: BlockView() for each in show.engines}
            serving = group.create_task(engine.serve(quiet))
            async with asyncio.timeout(30):
                while len(engine.blocks) < 50 or show.direct.compare(show.engines).wrong:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            quiet.set()
            await serving
            await second.stop()
            async with asyncio.timeout(30):
                while show.direct.compare(show.engines).wrong:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            held = len(engine.blocks)
            nothing = show.late.compare(show.engines)
            assert (nothing.missing, nothing.dead) == (held, 0)
            engine.crash()
            stale = show.direct.compare(show.engines)
            assert (stale.missing, stale.dead) == (0, held)
            await show.direct.stop()
    finally:
        engine.close()
