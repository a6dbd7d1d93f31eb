"""The set-up of a case with a real engine: one kvbus, a router that starts with it, and a router that starts late.

Their blocks are compared with the engine's whenever it serves no request.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from kvbus.client import BlockView, Removed, Subscriber, Synced
from tests.doubles.bus import eventually
from tests.doubles.child import Child
from tests.ports import free_port, ports_in_a_row

from .asking import answering, fetched
from .outcome import ARRIVAL, Blocks, Outcome, Point, blocks_of, blocks_of_text, score
from .traffic import Traffic

if TYPE_CHECKING:
    from types import TracebackType

    from .engine import Engine

QUIET: Final = 20.0
"""Maximum seconds until all views are equal to the engine's blocks, once it serves no request."""

KVBUS: Final = str(Path(sys.executable).with_name("kvbus"))


class Bus:
    """One ``kvbus run``, which can be killed and started again with the same configuration and state."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        http = f"127.0.0.1:{free_port()}"
        self._url = f"http://{http}"
        path = directory / "kvbus.yaml"
        path.write_text(json.dumps({**config, "http": http, "state_dir": str(directory / "state")}))  # JSON is YAML
        self.process = Child("kvbus", [KVBUS, "run", "-c", str(path)], directory)

    async def start(self) -> None:
        await self.process.start()
        await answering(f"{self._url}/readyz", 60, self.process)

        async def has_source() -> bool:  # the discovery may still be looking for the engine
            return bool(await self.sources())

        await eventually(has_source, "a source")

    async def sources(self) -> list[dict[str, Any]]:
        sources: list[dict[str, Any]] = json.loads(await fetched(f"{self._url}/sources"))
        return sources

    async def blocks(self, query: str = "") -> Blocks:
        return blocks_of_text(await fetched(f"{self._url}/blocks{query}"))


class Router:
    """A router that reads one stream with kvbus's client library, and the blocks that it has."""

    def __init__(self, live: str, replay: str) -> None:
        self._subscriber = Subscriber(live, replay)
        self._view = BlockView()
        self.updates = self.removed = 0

    async def follow(self, *, until_synced: bool = False) -> None:
        """Read the stream until the task is cancelled.

        With ``until_synced``, read only until the client has received the complete first replay or snapshot.
        """
        async with self._subscriber:
            while True:
                update = await self._subscriber.receive()
                self.removed += sum(isinstance(change, Removed) for change in self._view.update(update))
                self.updates += 1
                if until_synced and isinstance(update, Synced):
                    return

    @property
    def blocks(self) -> Blocks:
        return blocks_of(block.to_json() for block in self._view)


class Scene:
    """A running engine, and a kvbus with its own routers.

    Args:
        engine: a running engine with blocks of earlier scenes.
        directory: directory of all files of this scene.
        config: further configuration of kvbus. The mappings ``source`` and ``output`` in it have keys of kvbus's only
            source and only output.
        outcome: the object that gets the results.
        counted: whether kvbus counts the engine's copies. A kvbus that reads another kvbus cannot count them.
    """

    def __init__(
        self, engine: Engine, directory: Path, config: dict[str, Any], outcome: Outcome, *, counted: bool = True
    ) -> None:
        ranks = engine.setup.ranks
        live, replay = ports_in_a_row(ranks), ports_in_a_row(ranks)
        self.streams = [(f"tcp://127.0.0.1:{live + rank}", f"tcp://127.0.0.1:{replay + rank}") for rank in range(ranks)]
        given = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint, "data_parallel_size": ranks}
        source, output = config.get("source", {}), config.get("output", {})
        source = {"name": "engine"} | ({} if "discover" in source else given) | source
        output = {"endpoint": self.streams[0][0], "replay_endpoint": self.streams[0][1]} | output
        rest = {key: value for key, value in config.items() if key not in ("source", "output")}
        self.engine = engine
        self.directory = directory
        self.config: dict[str, Any] = {"sources": [source], "outputs": [output], **rest}
        self.bus = Bus(directory, self.config)
        self.outcome = outcome
        self.traffic = Traffic(engine.api, seed=sum(directory.name.encode()))
        self._counted = counted
        self._groups = config.get("groups", "prefix")
        self._removed = 0
        self._early = [Router(*stream) for stream in self.streams]
        self._following: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.bus.start()
        self._following = [asyncio.ensure_future(router.follow()) for router in self._early]
        await self.quiet(ARRIVAL)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await self.bus.process.close()

    async def flowing(self, updates: int) -> None:
        """Wait until the routers that were connected from the start have together read ``updates`` more updates."""
        end = sum(router.updates for router in self._early) + updates

        async def arrived() -> bool:
            return sum(router.updates for router in self._early) >= end

        await eventually(arrived, "every batch")

    async def quiet(self, what: str, *, within: float = QUIET, asleep: bool = False) -> None:
        """Compare all views with the engine until they are equal, for at most ``within`` seconds.

        Unless the engine is ``asleep``, wait also until it has published all its events. An engine that sleeps does not
        publish its last events.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while True:
            pool = await self.engine.pool()
            blocks = pool.of(self._groups)
            scores = {
                "kvbus": score(blocks, await self.bus.blocks(), counted=self._counted),
                "late router": score(blocks, await self._late()),
                "early router": score(blocks, {key: 1 for router in self._early for key in router.blocks}),
            }
            copied = sum(copies > 1 for copies in blocks.values())
            removed = sum(router.removed for router in self._early) - self._removed
            point = Point(what, len(blocks), copied, removed, scores, loop.time() - begin)
            if (point.exact and (asleep or not pool.waiting)) or point.seconds > within:
                break
            await asyncio.sleep(0.25)
        if pool.waiting and not asleep:
            self.outcome.notes.append(f"{what}: the engine has not sent {pool.waiting} events")
        if not point.exact:
            said = [(each["state"], "partial" if each["partial"] else "complete") for each in await self.bus.sources()]
            self.outcome.notes.append(f"{what}: kvbus says of each rank: {', '.join(map(' and '.join, said))}")
        self._removed += removed
        self.outcome.points.append(point)

    async def _late(self) -> Blocks:
        routers = [Router(*stream) for stream in self.streams]
        async with asyncio.timeout(QUIET):
            await asyncio.gather(*(router.follow(until_synced=True) for router in routers))
        return {key: 1 for router in routers for key in router.blocks}
