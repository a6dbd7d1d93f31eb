"""The show: the engines, kvbus and the routers, what happens to them, and the verdict."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from kvbus.tools.demo.stage import CAST, Bus, DirectRouter, Engine, Router, pause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

LAP_SECONDS: Final = 24.0
"""Length of one round of events. A shorter show has one round in its time; a longer one repeats it."""
REPAIR_SECONDS: Final = 10.0
"""Time that kvbus has to repair a fault."""

_LOST_BATCHES: Final = 5
_DOWN_SECONDS: Final = 1.5
_SAMPLE_SECONDS: Final = 0.25
_RATE_SAMPLES: Final = 9


class Tone(Enum):
    """Who a line of the story is about."""

    SCENE = "scene"
    FAULT = "fault"
    KVBUS = "kvbus"
    DIRECT = "no kvbus"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Line:
    """One event of the story, ``at`` seconds after the start."""

    at: float
    tone: Tone
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One router compared with the caches of the engines.

    Attributes:
        name: name of the router.
        behind_kvbus: False for the router that reads the engines itself.
        started: whether it runs.
        blocks: blocks that it holds.
        missing: blocks that only the engines have.
        dead: blocks that only the router has.
    """

    name: str
    behind_kvbus: bool
    started: bool
    blocks: int = 0
    missing: int = 0
    dead: int = 0

    @property
    def wrong(self) -> int:
        """Missing and dead blocks."""
        return self.missing + self.dead


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of the show. ``exact`` is None if Ctrl-C came too early, or in the middle of a repair."""

    rows: tuple[Row, ...]
    engine_blocks: int
    exact: bool | None

    def sentences(self) -> list[str]:
        """Return the verdict in plain words. Its last sentence is about ``exact``."""
        judged = [row for row in self.rows if row.behind_kvbus]
        said = []
        for row in self.rows:
            if not row.behind_kvbus:
                said.append(f"Without kvbus, a router has {row.missing:,} blocks missing and {row.dead:,} dead blocks.")
            elif row.wrong:
                said.append(f"{row.name} has {row.missing:,} blocks missing and {row.dead:,} dead blocks.")
        if self.exact is None:
            said.append("No verdict: the demo was ended in the middle of a repair, or before an engine had a block.")
        elif self.exact:
            who = " and ".join(row.name for row in judged)
            have = "holds" if len(judged) == 1 else "hold"
            said.append(f"EXACT: {who} {have} the {self.engine_blocks:,} blocks of the engines' caches, and no other.")
        else:
            said.append("NOT EXACT: a router behind kvbus differs from the engines' caches.")
        return said


class Show:
    """Everything on the stage. Call `play` once, and `close` in any case.

    Args:
        seconds: its length; infinity for an endless show.
        seed: seed of the engines' requests.
        directory: a temporary directory, for the sockets and for kvbus.
        tell: called with each line of the story.
        stop: set it to end the show early.
    """

    def __init__(
        self, seconds: float, seed: int, directory: str, tell: Callable[[Line], None], stop: asyncio.Event
    ) -> None:
        self.seconds: Final = seconds
        self.engines: Final = [
            Engine(*actor, seed=seed + number, directory=directory) for number, actor in enumerate(CAST)
        ]
        self.bus: Final = Bus(self.engines, directory)
        engines = {each.name: (each.endpoint, each.replay_endpoint) for each in self.engines}
        self.early: Final = Router("router-a", self.bus.streams)
        self.late: Final = Router("router-b", self.bus.streams)
        self.direct: Final = DirectRouter("no kvbus", engines)
        self.routers: Final = (self.early, self.late, self.direct)
        self.rows: list[Row] = []
        self.history: Final[dict[str, deque[int | None]]] = {each.name: deque(maxlen=400) for each in self.routers}
        """Wrong blocks of each router, newest last; None where it did not run."""
        self._counts: deque[tuple[float, dict[str, int]]] = deque(maxlen=_RATE_SAMPLES)
        self._clock: Final = asyncio.get_running_loop().time
        self._begin = self._clock()
        self._tell: Final = tell
        self._stop: Final = stop
        self._repairing = False
        self.sample()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begin

    def rate(self, name: str) -> float:
        """Return the batches per second of an engine or of ``kvbus``, over the last two seconds."""
        (then, before), (now, after) = self._counts[0], self._counts[-1]
        return max(0, after[name] - before[name]) / (now - then) if now > then else 0.0

    async def play(self, group: asyncio.TaskGroup) -> Verdict:
        """Play, and compare all routers with the engines at the end.

        Raises:
            BusError: ``kvbus run`` did not start.
            BindError: an engine cannot bind its sockets.
        """
        for engine in self.engines:
            engine.open()
        background = [group.create_task(self.bus.watch())]
        await self.bus.start()
        quiet = asyncio.Event()
        self.early.start(group)
        self.direct.start(group)
        serving = [group.create_task(engine.serve(quiet)) for engine in self.engines]
        self._begin = self._clock()
        background.append(group.create_task(self._sampling()))
        self._say(Tone.SCENE, "engines, kvbus and router-a run; `no kvbus` reads the engines")
        await self._play(group)
        await pause(min(self.seconds, 1e9) - self.elapsed(), self._stop)
        quiet.set()
        await asyncio.gather(*serving)
        interrupted = self._stop.is_set() and self._repairing
        within = None if not interrupted else 0.5 if self.bus.up else 0.0
        exact: bool | None = await self._until(self._exact, within, even_if_stopped=True) is not None
        for task in background:
            task.cancel()
        self.sample()
        blocks = sum(len(engine.blocks) for engine in self.engines)
        if not blocks or (interrupted and not exact):
            exact = None
        return Verdict(tuple(row for row in self.rows if row.started), blocks, exact)

    async def close(self) -> None:
        """Stop the routers, end kvbus, and close the engines."""
        for router in self.routers:
            await router.stop()
        await self.bus.kill()
        for engine in self.engines:
            engine.close()

    def sample(self) -> None:
        """Compare the routers with the engines now, for the screen."""
        self.rows = list(map(self._row, self.routers))
        for row in self.rows:
            self.history[row.name].append(row.wrong if row.started else None)
        counts = {engine.name: engine.published for engine in self.engines} | {"kvbus": self.bus.total("batches")}
        self._counts.append((self._clock(), counts))

    async def _sampling(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            self.sample()

    async def _play(self, group: asyncio.TaskGroup) -> None:
        lap = min(LAP_SECONDS, self.seconds)
        acts: tuple[tuple[float, Callable[[asyncio.TaskGroup], Awaitable[None]]], ...] = (
            (0.12, self._lose), (0.30, self._start_late), (0.48, self._crash), (0.66, self._kill),
        )  # fmt: skip
        for number in itertools.count():
            for at, act in acts:
                begin = (number + at) * lap
                if number and begin + lap / 4 > self.seconds:
                    return
                await pause(begin - self.elapsed(), self._stop)
                if self._stop.is_set():
                    return
                self._repairing = True
                await act(group)
                if self._stop.is_set():
                    return  # it is still in the middle of the repair
                self._repairing = False

    async def _lose(self, _: asyncio.TaskGroup) -> None:
        engine = self.engines[-1]
        self._say(Tone.FAULT, f"the network loses {_LOST_BATCHES} batches of {engine.name}")
        engine.lose(_LOST_BATCHES)
        await self._until(lambda: not engine.losing)
        if await self._repaired("gap seen, lost batches fetched"):
            self._say_direct()

    async def _start_late(self, group: asyncio.TaskGroup) -> None:
        again = self.late.started
        await self.late.stop()
        self.late.start(group)
        happened = "restarts and holds no block" if again else "starts late and holds no block yet"
        self._say(Tone.FAULT if again else Tone.SCENE, f"{self.late.name} {happened}")
        await self._repaired(f"{self.late.name} got all of the past")

    async def _crash(self, _: asyncio.TaskGroup) -> None:
        engine = self.engines[0]
        self._say(
            Tone.FAULT, f"{engine.name} crashes and restarts: all {len(engine.blocks):,} blocks of its cache are gone"
        )
        engine.crash()
        if await self._repaired("restart seen, dead blocks cleared"):
            self._say_direct()

    async def _kill(self, _: asyncio.TaskGroup) -> None:
        self._say(Tone.FAULT, "kvbus itself is killed (SIGKILL); engines and routers go on")
        restarts = self.early.restarts + self.late.restarts
        await self.bus.kill()
        await pause(min(_DOWN_SECONDS, self.seconds / 10), self._stop)
        if self._stop.is_set():
            return
        await self.bus.start()
        self._say(Tone.SCENE, "kvbus runs again")
        repaired = await self._repaired("caught up with the engines")
        if repaired and restarts == self.early.restarts + self.late.restarts:
            self._say(Tone.KVBUS, "no router noticed the restart, none had to rebuild")

    async def _repaired(self, how: str) -> bool:
        took = await self._until(self._exact)
        if took is not None:
            self._say(Tone.KVBUS, f"{how}: exact after {1000 * took:.0f} ms")
        elif not self._stop.is_set():
            self._say(Tone.WRONG, f"the routers behind kvbus are not exact after {REPAIR_SECONDS:.0f} s")
        return took is not None

    def _say_direct(self) -> None:
        row = self._row(self.direct)
        self._say(Tone.DIRECT, f"the router without kvbus has {row.missing:,} blocks missing and {row.dead:,} dead")

    def _row(self, router: Router) -> Row:
        if not router.started:
            return Row(router.name, router.behind_kvbus, started=False)
        missing, dead = router.wrong(self.engines)
        return Row(router.name, router.behind_kvbus, True, router.blocks, missing, dead)

    def _exact(self) -> bool:
        judged: Iterable[Router] = (router for router in (self.early, self.late) if router.started)
        return self.bus.up and all(router.wrong(self.engines) == (0, 0) for router in judged)

    async def _until(
        self, holds: Callable[[], bool], within: float | None = None, *, even_if_stopped: bool = False
    ) -> float | None:
        """Wait until a condition holds, and return the seconds; None if it does not in time, or the show is stopped."""
        begin = self._clock()
        end = begin + (REPAIR_SECONDS if within is None else within)
        while not holds():
            if self._clock() > end or (self._stop.is_set() and not even_if_stopped):
                return None
            await asyncio.sleep(0.03)
        return self._clock() - begin

    def _say(self, tone: Tone, text: str) -> None:
        self._tell(Line(self.elapsed(), tone, text))
