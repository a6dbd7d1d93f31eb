"""Run one kvbus for an hour between publishers of released engines and routers of other projects.

    python -m tests.interop.hours [--minutes 60] [--rate 4] [--directory DIR]

The caches are full and evict. In each round one ordinary thing happens: a router or an engine restarts, the engines
pause, or kvbus is restarted with SIGTERM. Then the engines stop publishing, every router must hold exactly the engines'
blocks, and the resource usage of kvbus is recorded. Exit code 1: a router was wrong, or a resource grew. The results
are in DIR/hours.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from tests.chaos.bus import BusProcess, total, unaccounted
from tests.conform import judged
from tests.ports import free_port, ports_in_a_row
from tests.typed import there

from .cache import Known, score
from .expected import THROUGH_KVBUS
from .scene import REPLAY
from .seats import ROUTERS, Engine, Seat
from .taken import Sampler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

EXACT_WITHIN: Final = 60.0
"""Seconds that a router gets to hold exactly the engines' blocks. After that, it counts as wrong."""

PAUSE: Final = 20.0
AWAY: Final = 75.0
"""Seconds for which an engine stays stopped: in this time kvbus clears its blocks and tries to connect several
times.
"""

_TROUBLE: Final = re.compile(r"error|panic|fatal|traceback|exception|warn", re.IGNORECASE)
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_NUMBERS: Final = re.compile(r"\d[\d.:TZ-]*")


class Hours:
    """The engines, the kvbus and the routers of one long run, and the measured values."""

    def __init__(self, directory: Path, rate: float) -> None:
        self._rate = rate
        first = ports_in_a_row(2 * REPLAY)
        names = [name for name in judged.CAPTURES if judged.home_of(name) is not None]
        self.engines = [Engine(name, rank, first, directory) for rank, name in enumerate(names)]
        here = [each for each in ROUTERS if each[0].lacking() is None]
        self.seats = [Seat.at_free_ports(*each, len(self.engines), directory) for each in here]
        self.lacking = [judged.lacking(name) for name in judged.CAPTURES if name not in names]
        self.lacking += [f"{kind.name}: {why}" for kind, _ in ROUTERS if (why := kind.lacking())]
        source = {
            "name": "engine",
            "endpoint": f"tcp://localhost:{first}",
            "replay_endpoint": f"tcp://localhost:{first + REPLAY}",
            "data_parallel_size": len(self.engines),
        }
        self._http, state = free_port(), directory / "state"
        outputs = [seat.output for seat in self.seats]
        common = {"model": "m", "worker": "w", "state_dir": str(state)}
        self.bus = BusProcess(directory, {"sources": [source], "outputs": outputs, **common}, self._http, None)
        self.sampler = Sampler(self.bus, state)
        self.failures: list[str] = []
        self.happened: Counter[str] = Counter()
        self.heard = 0
        """Number of events that the client of ``/events`` received. The client is connected all the time."""
        self._complaints = 0

    @property
    def live(self) -> Known:
        return {block: entry for engine in self.engines for block, entry in engine.cache.live.items()}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        following = asyncio.ensure_future(self._follow())
        try:
            await asyncio.gather(*(engine.child.start() for engine in self.engines))
            await self.bus.start()
            await asyncio.gather(*(seat.restart() for seat in self.seats))
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await asyncio.gather(*(seat.router.stop() for seat in self.seats if seat.router is not None))
            await self.bus.close()
            await asyncio.gather(*(engine.child.close() for engine in self.engines))

    async def _follow(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=PAUSE)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"http://127.0.0.1:{self._http}/events") as answer:
                        async for line in answer.content:
                            self.heard += line.startswith(b"event:")
                await asyncio.sleep(1)

    async def flow(self, seconds: float) -> None:
        """Publish batches from all engines at the configured rate for some seconds."""
        begin = time.monotonic()
        for at in range(1, round(seconds * self._rate) + 1):
            for engine in self.engines:
                engine.publish()
            await asyncio.sleep(max(0.0, begin + at / self._rate - time.monotonic()))

    async def restart_bus(self) -> None:
        await self.bus.kill(orderly=True)
        await self.bus.start()
        # A router that ignores clears keeps the blocks that were evicted while kvbus was stopped.
        for seat in self.seats:
            if "bus_killed_state" in THROUGH_KVBUS.get(seat.kind.name, {}):
                await seat.restart()

    def faults(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """Return one fault of each kind except a restart of kvbus. A fault is a name and a function.

        Faults of routers and faults of engines alternate.
        """
        routers = [(f"{seat.kind.name} restarts", seat.restart) for seat in self.seats]
        others = [(f"{engine.name} restarts", engine.restart) for engine in self.engines]
        others += [("an engine is away", partial(self.engines[0].restart, AWAY))]
        others += [("pause", partial(asyncio.sleep, PAUSE)), ("nothing", partial(asyncio.sleep, 0))]
        mixed = itertools.zip_longest(routers, others)
        return [each for pair in mixed for each in pair if each is not None]

    async def round(self, name: str, fault: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Publish batches, cause one fault, and check the view of every router afterwards."""
        half = seconds / 2
        await self.flow(half)
        flowing = asyncio.ensure_future(self.flow(half)) if name != "pause" else None
        await fault()
        await (flowing or self.flow(half))
        self.happened[name] += 1
        known = {block: entry for engine in self.engines for block, entry in engine.cache.known.items()}
        await asyncio.gather(*(self._exact(seat, known, name) for seat in self.seats))
        await self._sample(name)

    async def _exact(self, seat: Seat, known: Known, after: str) -> None:
        begin = time.monotonic()
        while True:
            held, took = await there(seat.router).held(known), time.monotonic() - begin
            if held == self.live.keys():
                seat.exact += 1
                seat.slowest = max(seat.slowest, took)
                return
            if took > EXACT_WITHIN:
                break
            await asyncio.sleep(0.5)
        missing, dead = score(held, self.live)
        self._wrong(after, f"{seat.kind.name} misses {missing}, has {dead} dead")
        await seat.restart()  # so that the next round begins with an exact router

    async def _sample(self, after: str) -> None:
        metrics, taken = self.sampler.sample(await self.bus.get("/metrics"))
        wrong = unaccounted(metrics)
        if (blocks := total(metrics, "kvbus_blocks")) != len(self.live):
            wrong.append(f"kvbus counts {blocks:g} blocks, there are {len(self.live)}")
        self._wrong(after, *wrong, *self.bus.complaints()[self._complaints :])
        self._complaints = len(self.bus.complaints())
        shown = "  ".join(f"{what.partition(',')[0]} {value:.1f}" for what, value in taken.items())
        print(f"{self.sampler.now:6.0f} s  {after:34} {shown}", flush=True)  # noqa: T201

    def _wrong(self, after: str, *what: str) -> None:
        self.failures += (found := [f"{self.sampler.now:.0f} s, {after}: {each}" for each in what])
        print(*found, sep="\n", end="\n" * bool(found), flush=True)  # noqa: T201

    def verdict(self) -> dict[str, Any]:
        """Return all results of the run, with the routers that were wrong and the resources that grew."""
        growth = self.sampler.longest.growth()
        grown = [
            f"{what} grew from {each['first']:.1f} to {each['last']:.1f}"
            for what, each in growth.items()
            if each["grown"]
        ]
        return {
            "seconds": self.sampler.now,
            "engines": {engine.name: {"starts": engine.child.starts} for engine in self.engines},
            "routers": {
                seat.kind.name: {
                    "layout": seat.layout,
                    "starts": seat.starts,
                    "exact": seat.exact,
                    "slowest": seat.slowest,
                    "says": complained(seat.logs),
                }
                for seat in self.seats
            },
            "kvbus": {"starts": self.bus.child.starts, "says": complained(self.bus.child.log.read_text())},
            "growth": growth,
            "samples": {"at": self.sampler.longest.at, **self.sampler.longest.seen},
            "new series": self.sampler.new,
            "events heard": self.heard,
            "happened": self.happened,
            "not here": self.lacking,
            "failures": self.failures + grown,
        }


def complained(log: str) -> dict[str, int]:
    """Count the warnings and errors of a program's log, and return the 30 most frequent with their numbers.

    Lines that differ only in numbers count as equal.
    """
    lines = (_COLOURS.sub("", line) for line in log.splitlines())
    return dict(Counter(_NUMBERS.sub("#", line)[:300] for line in lines if _TROUBLE.search(line)).most_common(30))


def table(found: dict[str, Any]) -> list[str]:
    """Return two tables in Markdown: the results of the routers, and the resource usage of kvbus."""
    rows = ["| router | starts | exact, times | slowest, s | kinds of lines of trouble |", "|---|---|---|---|---|"]
    for name, each in found["routers"].items():
        rows.append(f"| {name} | {each['starts']} | {each['exact']} | {each['slowest']:.1f} | {len(each['says'])} |")
    rows += ["", "| kvbus, its longest life | after the warm-up | at the end | an hour |", "|---|---|---|---|"]
    for what, each in found["growth"].items():
        rows.append(f"| {what} | {each['first']:.1f} | {each['last']:.1f} | {each['an hour'] or 0:+.1f} |")
    return rows


async def run(directory: Path, minutes: float, rate: float) -> dict[str, Any]:
    """Run engines, kvbus and routers for some minutes, and return the results.

    kvbus restarts after a tenth of the time and at the end.
    """
    length = min(60.0, max(10.0, minutes * 60 / 40))
    hours = Hours(directory, rate)
    print(*(f"NOT HERE: {why}" for why in hours.lacking), sep="\n")  # noqa: T201
    if not hours.engines or not hours.seats:
        raise SystemExit("there is no engine, or no router: .ci/engines.sh and .ci/routers.sh get them")
    restart = ("kvbus restarts", hours.restart_bus)
    async with hours.running():
        last = minutes * 60 - length
        await hours.round("start", partial(asyncio.sleep, 0), length)
        await hours.round("nothing", partial(asyncio.sleep, 0), minutes * 6)
        await hours.round(*restart, length)
        for name, fault in itertools.cycle(hours.faults()):
            if hours.sampler.now > last:
                break
            await hours.round(name, fault, length)
        await hours.round(*restart, length)
        return hours.verdict()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interop.hours")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=4, help="batches per second of each engine")
    parser.add_argument(
        "--directory",
        type=Path,
        help="directory for logs and hours.json; by default a temporary directory, which is kept",
    )
    asked = parser.parse_args()
    directory = (asked.directory or Path(tempfile.mkdtemp(prefix="kvbus-hours-"))).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    print(f"everything is in {directory}", flush=True)  # noqa: T201
    found = asyncio.run(run(directory, asked.minutes, asked.rate))
    (directory / "hours.json").write_text(json.dumps(found, indent=1) + "\n")
    print(*table(found), *(f"FAILED: {each}" for each in found["failures"]), sep="\n")  # noqa: T201
    return bool(found["failures"])


if __name__ == "__main__":
    sys.exit(main())
