"""The show of ``kvbus demo``: its sequence of faults, its drawing on the terminal, and its verdict."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from kvbus.tools.demo.stage import Bus, Engine, Router, Row, pause
from kvbus.tools.terminal import Glyphs, counted, glyphs_for, panel, plain_table, right

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.panel import Panel

CAST: Final = (
    ("vllm-a", "vllm-0.33", 12.0, 400),
    ("vllm-b", "vllm-0.33", 11.0, 400),
    ("sglang", "sglang-0.5.23", 9.0, 500),
)
"""The engines of the demo.

Each has a name, the engine release that it simulates, a number of batches per second, and the size of its cache in
blocks.
"""
REPAIR_SECONDS: Final = 10.0
"""Maximum number of seconds after a fault until the routers that read kvbus must have exactly the engines' blocks."""

_LOST_BATCHES: Final = 5
_SAMPLE_SECONDS: Final = 0.25
_STYLES: Final = {"fault": "yellow", "kvbus": "green", "no kvbus": "red", "WRONG": "red bold"}
_LEGEND: Final = Text(" missing: only the engine has the block. dead: only the router has it ", "dim")


class Show:
    """The engines, the kvbus process and the routers of the demo. Call `play` once, and always call `close`.

    Args:
        seconds: length of the demo.
        directory: a temporary directory, for the sockets and for kvbus's files.
        say: function that prints a line of the story. Its arguments are the line's subject (``scene`` or a key of
            `_STYLES`) and its text.
        stop: an event that ends the show early when it is set.
    """

    def __init__(self, seconds: float, directory: str, say: Callable[[str, str], None], stop: asyncio.Event) -> None:
        self.seconds: Final = seconds
        self.engines: Final = [Engine(*each, seed, directory) for seed, each in enumerate(CAST)]
        self.bus: Final = Bus(self.engines, directory)
        self.early: Final = Router("router-a", self.bus.streams)
        self.late: Final = Router("router-b", self.bus.streams)
        self.direct: Final = Router("no kvbus", {each.name: each.endpoints for each in self.engines}, direct=True)
        self.history: Final[dict[str, deque[int | None]]] = defaultdict(lambda: deque(maxlen=400))
        """By router: the number of wrong blocks at each time when they were counted, newest last.

        It is None at times when the router did not run.
        """
        self._clock: Final = asyncio.get_running_loop().time
        self._begin = self._clock()
        self._say: Final = say
        self._stop: Final = stop

    @property
    def elapsed(self) -> float:
        """Number of seconds since the start of the show."""
        return self._clock() - self._begin

    def rows(self) -> list[Row]:
        """Compare the blocks of each router with the engines' current caches, and return a row for each router."""
        return [router.compare(self.engines) for router in (self.early, self.late, self.direct)]

    async def play(self, group: asyncio.TaskGroup) -> bool | None:
        """Play all scenes, and return whether the routers that read kvbus have exactly the engines' blocks.

        Return None if that cannot be said: kvbus does not run at the end, or no engine has a block.

        Raises:
            BusError: ``kvbus run`` did not start.
            BindError: an engine cannot bind its sockets.
        """
        for engine in self.engines:
            engine.open()
        await self.bus.start()
        quiet = asyncio.Event()
        self.early.start(group)
        self.direct.start(group)
        serving = [group.create_task(engine.serve(quiet)) for engine in self.engines]
        self._begin = self._clock()
        self._say("scene", "engines, kvbus and router-a run; the router `no kvbus` reads the engines directly")
        start_late = partial(self._start_late, group)
        for at, act in ((0.12, self._lose), (0.30, start_late), (0.48, self._crash), (0.66, self._kill)):
            await pause(at * self.seconds - self.elapsed, self._stop)
            if not self._stop.is_set():
                await act()
        await pause(self.seconds - self.elapsed, self._stop)
        quiet.set()
        await asyncio.gather(*serving)
        if not self.bus.sources or not any(engine.blocks for engine in self.engines):
            return None
        return await self._until(self._is_exact) is not None

    async def sample(self) -> None:
        """Read kvbus's counters, and append the current number of wrong blocks of each router to ``history``."""
        if self.bus.sources:
            await self.bus.read()
        for row in self.rows():
            self.history[row.name].append(None if row.blocks is None else row.wrong)

    async def close(self) -> None:
        """Stop the routers, kill kvbus, and close the engines."""
        for router in (self.early, self.late, self.direct):
            await router.stop()
        await self.bus.kill()
        for engine in self.engines:
            engine.close()

    async def _lose(self) -> None:
        engine = self.engines[-1]
        self._say("fault", f"the network loses {_LOST_BATCHES} batches of {engine.name}")
        engine.losing = _LOST_BATCHES
        await self._until(lambda: not engine.losing)
        await self._repair("saw the gap and fetched the lost batches")
        self._say_direct()

    async def _start_late(self, group: asyncio.TaskGroup) -> None:
        self._say("scene", f"{self.late.name} starts late and holds no block yet")
        self.late.start(group)
        await self._repair(f"{self.late.name} got all blocks")

    async def _crash(self) -> None:
        engine = self.engines[0]
        blocks = len(engine.blocks)
        self._say("fault", f"{engine.name} crashes and restarts: all {blocks:,} blocks of its cache are gone")
        engine.crash()
        await self._repair("saw the restart and cleared the dead blocks")
        self._say_direct()

    async def _kill(self) -> None:
        self._say("fault", "kvbus itself is killed (SIGKILL); engines and routers continue")
        restarts = self.early.restarts + self.late.restarts
        await self.bus.kill()
        await pause(min(1.5, self.seconds / 10), self._stop)
        if self._stop.is_set():
            return
        await self.bus.start()
        self._say("scene", "kvbus runs again")
        await self._repair("caught up with the engines")
        if restarts == self.early.restarts + self.late.restarts:
            self._say("kvbus", "no router noticed the restart of kvbus, and no router had to rebuild")

    async def _repair(self, how: str) -> None:
        seconds = await self._until(self._is_exact)
        if seconds is None:
            self._say("WRONG", f"the routers behind kvbus are not exact after {REPAIR_SECONDS:g} s")
        else:
            self._say("kvbus", f"{how}: exact after {1000 * seconds:.0f} ms")

    def _say_direct(self) -> None:
        row = self.direct.compare(self.engines)
        self._say("no kvbus", f"the router without kvbus has {row.missing:,} blocks missing and {row.dead:,} dead")

    def _is_exact(self) -> bool:
        return bool(self.bus.sources) and not any(row.wrong for row in self.rows() if not row.direct)

    async def _until(self, holds: Callable[[], bool]) -> float | None:
        """Wait until the condition holds.

        Return the seconds of waiting, or None if it does not hold in `REPAIR_SECONDS`.
        """
        begin = self._clock()
        while not holds():
            if self._clock() > begin + REPAIR_SECONDS:
                return None
            await asyncio.sleep(0.03)
        return self._clock() - begin


def render(show: Show, width: int, glyphs: Glyphs) -> Group:
    """Draw the current state of the show for a terminal of at least 80 columns."""
    seconds = f" {show.elapsed:4.0f} s of {show.seconds:g}"
    head = Text.assemble((" kvbus demo ", "reverse bold"), (f"{seconds}   status page ", "dim"))
    head.append(f"{show.bus.url}/", "underline")
    engines = plain_table(Column(no_wrap=True), Column("imitates", no_wrap=True), right("blocks"), right("batches"))
    for engine in show.engines:
        engines.add_row(Text(engine.name, "bold"), engine.dialect, f"{len(engine.blocks):,}", f"{engine.published:,}")
    running = Text(f"{glyphs.dot} running", "green bold")
    bus = plain_table(Column(running if show.bus.sources else Text(f"{glyphs.bad} down", "red bold")), right())
    bus.add_row("batches relayed", f"{show.bus.total('batches'):,}")
    bus.add_row("lost batches fetched", counted(show.bus.total("recovered"), "green"))
    bus.add_row("engine restarts seen", counted(show.bus.total("restarts"), "green"))
    top = Table.grid(Column(ratio=3), Column(ratio=2), expand=True)
    top.add_row(panel(engines, f"engines {glyphs.arrow}", "cyan"), panel(bus, f"kvbus {glyphs.arrow}", "yellow"))
    most = max((value or 0 for values in show.history.values() for value in values), default=0)
    charts = [_chart(list(values)[-(width - 46) :], most, glyphs) for values in show.history.values()]
    return Group(head, top, panel(_routers(show.rows(), glyphs, charts), "routers", "green", _LEGEND))


def render_verdict(rows: Sequence[Row], blocks: int, exact: bool | None, glyphs: Glyphs) -> Panel:
    """Draw the verdict at the end of the show: whether each router has exactly the engines' blocks.

    Args:
        rows: the comparison of each router with the engines.
        blocks: number of blocks in the engines' caches.
        exact: the result of `Show.play`.
        glyphs: the signs (symbols) that the terminal can show.
    """
    rows = [row for row in rows if row.blocks is not None]
    lines = []
    for row in rows:
        if row.direct or row.wrong:
            who = "Without kvbus, a router" if row.direct else row.name
            lines.append(f"{who} has {row.missing:,} blocks missing and {row.dead:,} dead blocks.")
    names = [row.name for row in rows if not row.direct]
    have = f"{' and '.join(names)} {'holds' if len(names) == 1 else 'hold'}"
    last, colour = {
        True: (f"EXACT: {have} the {blocks:,} blocks of the engines' caches, and no other.", "green"),
        False: ("NOT EXACT: a router behind kvbus differs from the engines' caches.", "red"),
        None: ("No verdict: the demo was ended while kvbus was down, or before an engine had a block.", "yellow"),
    }[exact]
    body = Group(_routers(rows, glyphs), Text(), *lines, Text(last, f"{colour} bold"))
    return panel(body, "verdict: each router against the engines' own caches", colour)


def _routers(rows: Sequence[Row], glyphs: Glyphs, charts: Sequence[Text] = ()) -> Table:
    heads = (Column(no_wrap=True), right("blocks"), right("missing"), right("dead"), Column(no_wrap=True))
    table = plain_table(*heads, *(["wrong blocks over time"] if charts else []), expand=False)
    for row, *chart in zip(rows, *([charts] if charts else []), strict=True):
        who = Text(row.name, "bold")
        if row.blocks is None:
            table.add_row(who, Text("later", "dim"), "", "", "", *chart)
        else:
            sign = Text(glyphs.bad, "red bold") if row.wrong else Text(glyphs.good, "green bold")
            wrong = (counted(count, "red bold") for count in (row.missing, row.dead))
            table.add_row(who, f"{row.blocks:,}", *wrong, sign, *chart)
    return table


def _chart(values: Sequence[int | None], most: int, glyphs: Glyphs) -> Text:
    chart = Text()
    for value in values:
        level = 0 if value is None else 1 if value == 0 else 2 + value * (len(glyphs.levels) - 3) // most
        chart.append(glyphs.levels[level], "red" if value else "green")
    return chart


async def play(console: Console, directory: str, stop: asyncio.Event, seconds: float) -> bool | None:
    """Play the show on a console, and return the result of `Show.play`.

    The lines of the story scroll above the drawing.

    Args:
        console: a terminal. A file or a pipe gets only the story and the verdict.
        directory: a temporary directory, for the sockets and for kvbus's files.
        stop: an event that ends the show early when it is set.
        seconds: length of the show.

    Raises:
        BusError: ``kvbus run`` did not start.
    """
    glyphs = glyphs_for(console)

    def say(who: str, text: str) -> None:
        line = Text.assemble((f"{show.elapsed:5.1f}  ", "dim"), (f"{who:8}  {text}", _STYLES.get(who, "")))
        console.print(line, soft_wrap=True)

    async def draw(live: Live) -> None:
        while True:
            await show.sample()
            live.update(render(show, console.width, glyphs), refresh=True)
            await asyncio.sleep(_SAMPLE_SECONDS)

    show = Show(seconds, directory, say, stop)
    # Draw in this event loop and not in Live's own thread, because a thread could see state that is being changed.
    try:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            async with asyncio.TaskGroup() as group:
                drawing = group.create_task(draw(live))
                try:
                    exact = await show.play(group)
                    rows, blocks = show.rows(), sum(len(engine.blocks) for engine in show.engines)
                finally:
                    drawing.cancel()
                    await show.close()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    console.print(render_verdict(rows, blocks, exact, glyphs))
    return exact
