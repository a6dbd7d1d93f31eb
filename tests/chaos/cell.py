"""A cell of the fault campaign: an engine, kvbus, its routers and the links between them.

It plays rounds of faults, and checks after each round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.chaos.bus import JOURNAL, SEND_HWM, SOURCE_TIMEOUT, BusProcess, Metrics, total
from tests.chaos.checks import Checks, Marks
from tests.chaos.engines import ENGINES, Engine
from tests.chaos.faults import ARMED, MAKERS
from tests.chaos.namespaces import Network, SmallDisk
from tests.chaos.plan import SHAPES, Fault, Round, make_round
from tests.chaos.routers import Router
from tests.chaos.tally import Tally
from tests.doubles.link import Link, Side
from tests.ports import ports_in_a_row

_DISK_BYTES: Final = 48 << 20
_SCRAPE_S: Final = 0.4
_STATE_PATIENCE: Final = 5.0
HOST: Final = "127.0.0.1"


class Cell:
    """A cell of the campaign in one generation: an engine, kvbus, its routers and the links between them.

    For the next generation, the campaign builds the cell anew.

    Args:
        seed: seed of the plan.
        number: number of the cell in the plan.
        generation: number of the generation in the plan.
        directory: an empty directory for all files.
        tally: counts the results.
        namespaces: whether mount and network namespaces are available.
    """

    def __init__(
        self, seed: int, number: int, generation: int, directory: Path, tally: Tally, *, namespaces: bool
    ) -> None:
        self.seed, self.number, self.generation = seed, number, generation
        self.shape = SHAPES[number]
        self.tally = tally
        self.bus_starts = 0
        self._directory = directory
        self._namespaces = namespaces
        self._traffic_over = asyncio.Event()
        self.links: dict[str, list[Link]] = {}
        self.networks: dict[str, Network] = {}
        self.disk: SmallDisk | None = None
        self.engine: Engine
        self.bus: BusProcess
        self.tried: Router
        """The router that faults stop, kill and disconnect."""
        self.bystander: Router
        """The other router, which faults of the router `tried` must never affect."""
        self.lag = 0.0
        """Maximum delay of this process in the round, in seconds.

        Checks allow for it, because it shows a busy machine.
        """
        self._checks = Checks(self)

    # -- building ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        shape, base = self.shape, ports_in_a_row(48)
        ranks = range(shape.ranks)
        directory = self._directory
        engine_host = out_host = HOST
        if shape.namespaces:
            for name in ("engine", "router"):
                self.networks[name] = Network(directory, name)
                await self.networks[name].open()
            engine_host, out_host = self.networks["engine"].address, self.networks["router"].outside
        if shape.state and self._namespaces:
            self.disk = SmallDisk(directory, directory / "state", _DISK_BYTES)
            await self.disk.open()

        live, replay, via, via_replay = base, base + 4, base + 8, base + 12
        out, out_replay, out_snapshot, merged, merged_replay, http = (base + n for n in (16, 20, 24, 28, 29, 30))
        via_out, via_out_replay = base + 32, base + 36
        if not shape.namespaces:
            talks: Side = "client" if shape.dials_in else "server"
            self.links = {
                "live": [Link("live", via + r, live + r, talks) for r in ranks],
                "replay": [Link("replay", via_replay + r, replay + r) for r in ranks],
                "out": [Link("out", via_out + r, out + r, "server") for r in ranks],
                "out replay": [Link("out replay", via_out_replay + r, out_replay + r) for r in ranks],
            }
        for link in self._all_links():
            await link.start()

        # If the engine connects to kvbus, the proxy is before kvbus's port; otherwise it is before the engine's port.
        engine_live = via if shape.dials_in else live
        self.engine = ENGINES[shape.engine](
            shape,
            engine_host,
            (engine_live, replay),
            directory,
            self.networks.get("engine"),
            self.seed * 1000 + self.number * 100 + self.generation,
        )
        behind = not shape.namespaces
        source = {
            "name": "engine",
            "endpoint": f"tcp://{engine_host}:{live if shape.dials_in or not behind else via}",
            "replay_endpoint": f"tcp://{engine_host}:{via_replay if behind else replay}",
            "bind": shape.dials_in,
            "data_parallel_size": shape.ranks,
        }
        routers = {
            "name": "routers",
            "endpoint": f"tcp://{out_host}:{out}",
            "replay_endpoint": f"tcp://{out_host}:{out_replay}",
            "snapshot_endpoint": f"tcp://{out_host}:{out_snapshot}" if shape.snapshots else None,
        }
        both = {
            "name": "merged",
            "endpoint": f"tcp://{out_host}:{merged}",
            "replay_endpoint": f"tcp://{out_host}:{merged_replay}",
            "layout": "merged",
        }
        bounds = {"journal_batches": JOURNAL, "send_hwm": SEND_HWM}
        config = {
            "sources": [source],
            "outputs": [routers | bounds, both | bounds],
            "source_timeout": SOURCE_TIMEOUT,
            "probe_interval": 0.25,
            "state_dir": str(directory / "state") if shape.state else None,
        }
        self.bus = BusProcess(directory, config, http, self.disk)

        def streams(live: int, replay: int, *, raw: bool) -> list[dict[str, Any]]:
            return [
                {
                    "name": f"routers/{r}",
                    "endpoint": f"tcp://{out_host}:{live + r}",
                    "replay": f"tcp://{out_host}:{replay + r}",
                    "snapshot": f"tcp://{out_host}:{out_snapshot + r}" if shape.snapshots else None,
                    "raw": raw,
                }
                for r in ranks
            ]

        tried = streams(via_out, via_out_replay, raw=False) if behind else streams(out, out_replay, raw=False)
        whole = {"name": "merged", "endpoint": both["endpoint"], "replay": both["replay_endpoint"], "raw": True}
        self.tried = Router("tried", tried, directory, self.networks.get("router"))
        self.bystander = Router("bystander", [*streams(out, out_replay, raw=True), whole], directory)
        await self.bus.start()
        self.bus_starts += 1
        await self.tried.start()
        await self.bystander.start()

    async def close(self) -> None:
        parts = [getattr(self, name, None) for name in ("engine", "tried", "bystander", "bus")]
        for part in (*parts, *self._all_links(), self.disk, *self.networks.values()):
            if part is not None:
                await part.close()

    def _all_links(self) -> list[Link]:
        return [link for links in self.links.values() for link in links]

    # -- for faults --------------------------------------------------------------------------------------------------

    async def soon(self, condition: Callable[[], object], patience: float) -> bool:
        """Return whether the condition holds within ``patience`` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        while not condition():
            if loop.time() > end:
                return False
            await asyncio.sleep(0.01)
        return True

    async def until(self, condition: Callable[[], object], what: str, patience: float) -> None:
        if not await self.soon(condition, patience):
            raise AssertionError(f"not within {patience:g} s: {what}")

    async def while_traffic(self, condition: Callable[[], object]) -> bool:
        """Return whether the condition holds before the round's traffic ends."""
        while not condition():
            if self._traffic_over.is_set():
                return False
            await asyncio.sleep(0.02)
        return True

    async def counter(self, name: str) -> float:
        return total(await self.bus.metrics(), name)

    async def connected(self) -> None:
        """Wait until every source of kvbus is live: connected to its rank, with the rank's older batches read by a
        replay.
        """
        async with asyncio.timeout(60):
            while not all(source["state"] == "live" for source in await self.bus.sources()):  # noqa: ASYNC110 - told by HTTP
                await asyncio.sleep(0.05)

    async def gives_up_state(self) -> bool:
        """Return whether kvbus reports within 5 s that it no longer writes its state."""
        end = asyncio.get_running_loop().time() + _STATE_PATIENCE
        while asyncio.get_running_loop().time() < end:
            if total(await self.bus.metrics(), "kvbus_state_writing") == 0:
                return True
            await asyncio.sleep(0.05)
        return False

    async def restart_bus(self, *, orderly: bool = False) -> None:
        """End kvbus with SIGKILL, or with SIGTERM if ``orderly``, and start it again."""
        await self.bus.kill(orderly=orderly)
        self.bus_starts += 1
        await self.bus.start()

    # -- rounds ------------------------------------------------------------------------------------------------------

    async def play(self, number: int) -> None:
        """Play a round of the plan.

        Raises:
            AssertionError: a check failed. The message names the round and the command that repeats it.
        """
        plan = make_round(self.seed, self.number, self.generation, number)
        try:
            await self._play(plan)
        except Exception as error:
            faults = "\n    ".join(str(fault) for fault in plan.faults)
            rounds = f"ROUNDS={number + 1}" if number < 12 else f"FIRST={number - 3} ROUNDS={number + 1}"
            repeat = f"make chaos SEED={self.seed} CELL={self.number} GENERATION={self.generation} {rounds}"
            raise AssertionError(
                f"cell {self.number} ({self.shape.name}), generation {self.generation}, round {number}"
                f" ({plan.flavour}): {type(error).__name__}: {error}\n    {faults}\n  repeat with: {repeat}"
            ) from error

    async def _play(self, plan: Round) -> None:
        self._traffic_over.clear()
        self.lag = 0.0
        for link in self._all_links():
            link.wire.dropped.clear()
        marks = await self._checks.begin(plan, self.bus_starts)
        watch = asyncio.ensure_future(self._watch())
        try:
            await self.engine.begin(plan.seed)
            loop = asyncio.get_running_loop()
            start = loop.time()
            armed: list[asyncio.Task[None]] = []
            others: list[asyncio.Task[None]] = []
            for fault in plan.faults:
                await asyncio.sleep(max(0.0, start + fault.at - loop.time()))
                task = asyncio.ensure_future(self._make(fault, marks))
                (armed if fault.kind in ARMED else others).append(task)
            await self._all(others, 240)
            async with asyncio.timeout(120):
                await self.engine.idle()
            self._traffic_over.set()
            await self._all(armed, 10)
            for link in self._all_links():
                link.wire.drop = link.wire.double = link.wire.swap = 0
        finally:
            watch.cancel()
            (found,) = await asyncio.gather(watch, return_exceptions=True)
        if isinstance(found, Exception):
            raise found
        await self._checks.end(plan, marks)

    async def _all(self, tasks: list[asyncio.Task[None]], patience: float) -> None:
        try:
            async with asyncio.timeout(patience):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _make(self, fault: Fault, marks: Marks) -> None:
        if fault.kind in ("disk full", "restart on a full disk") and self.disk is None:
            return  # the summary reports this fault as skipped
        try:
            evidence = await MAKERS[fault.kind](self, fault)
        except Exception as error:
            raise AssertionError(f"{fault}: {type(error).__name__}: {error}") from error
        self.tally.hit(fault.kind, evidence)
        if evidence:
            marks.kinds.add(fault.kind)

    async def _watch(self) -> None:
        """At each scrape during the round, check kvbus's counters of missing batches.

        Also measure `lag`, the longest delay of this event loop, by which a check may be late through no fault of
        kvbus.
        """
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _SCRAPE_S
            await asyncio.sleep(_SCRAPE_S)
            self.lag = max(self.lag, loop.time() - due)
            try:
                metrics: Metrics = await self.bus.metrics()
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue  # kvbus is killed, stopped or starting; the fault checks that it comes back
            self._checks.scrape(metrics)

    def sample(self) -> None:
        """Record memory and file descriptors of the processes that run until the end of the cell."""
        if not self.shape.kills_bus:
            for child in (self.bus.child, self.bystander.child):
                taken = {"memory, MiB": child.rss() / 2**20, "descriptors": child.descriptors()}
                self.tally.growth[f"{child.name} ({self.shape.name})"].add(time.monotonic(), taken)
