"""The scene: the cast on its ports with the bus between them, and the acts of the script."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvbus.admin.views import source_json
from kvbus.config import load
from kvbus.daemon import Daemon
from kvbus.demo.engines import CAST, Casting, Engine, Rank
from kvbus.demo.frame import Cell, Frame, Match, OutputRow, RouterRow, SourceRow
from kvbus.demo.ports import LOOPBACK, PortRun
from kvbus.demo.routers import Feed, Place, Router
from kvbus.demo.script import Act, Kind, plan
from kvbus.demo.story import Story, Tone
from kvbus.demo.verdict import Comparison, Verdict, compare, truth_keys, view_keys
from kvbus.demo.waiting import pause, until
from kvbus.errors import BindError

OUTPUTS: Final = (("dynamo", "dynamo"), ("sgl-router", "sglang"))
"""The bus's outputs: name and profile, which is a family of routers with an encoding and a replay framing."""

PATIENCE_S: Final = 10.0
"""How long the bus may take for anything before the demo calls it a failure."""

_DOWNTIME_S: Final = 0.6
_RATE_WINDOW_S: Final = 3.0
_TAIL: Final = 3
_OPEN_TRIES: Final = 5


class Scene:
    """Engines, bus and routers. Make it inside a running loop; `open` it, `play` it, `settle`, `close`.

    Args:
        seconds: length of the demo, None for endless.
        seed: the same seed, the same workload and the same script.
        cast: the engines, by default `CAST`.
        script: what happens, by default `plan`.
    """

    def __init__(
        self,
        *,
        seconds: float | None = None,
        seed: int = 0,
        cast: Sequence[Casting] | None = None,
        script: Iterable[Act] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time()
        self._seconds = seconds
        self._seed = seed
        self._cast = CAST if cast is None else cast
        self._script = script
        self.story: Final = Story(self.elapsed)
        self.engines: list[Engine] = []
        self.ranks: list[Rank] = []
        self.routers: list[Router] = []
        self._daemon: Daemon | None = None
        self._serving: list[asyncio.Task[None]] = []
        self._dialects: dict[str, str] = {}
        self._seen: deque[tuple[float, list[int]]] = deque()
        self._agreed: dict[tuple[int, int], tuple[int, Feed, int, bool]] = {}

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._loop.time() - self._begin

    @property
    def daemon(self) -> Daemon:
        """The bus, while the scene is open."""
        if self._daemon is None:
            raise RuntimeError("the scene is not open")
        return self._daemon

    # -- opening and closing ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Build everything on ports that are free: engines first, then the bus.

        Raises:
            BindError: ports that were free are taken, again and again.
        """
        for tries_left in reversed(range(_OPEN_TRIES)):
            try:
                await self._build()
            except BindError:
                await self.close()
                if not tries_left:
                    raise
            else:
                return

    async def _build(self) -> None:
        ranks = sum(len(casting.rates) for casting in self._cast)
        ports = PortRun(2 * ranks * (1 + len(OUTPUTS)))
        sources = []
        self.engines, self.ranks, self.routers = [], [], []
        for casting in self._cast:
            size = len(casting.rates)
            live, replay = ports.take(size), ports.take(size)
            made = [Rank(casting, r, self._seed, _tcp(live + r), _tcp(replay + r)) for r in range(size)]
            engine = Engine(casting, made)
            self.engines.append(engine)
            self.ranks += made
            engine.open()
            sources.append(
                {
                    "name": casting.name,
                    "endpoint": _tcp(live),
                    "replay_endpoint": _tcp(replay),
                    "data_parallel_size": size,
                }
            )
        outputs = [
            {
                "name": name,
                "profile": profile,
                "endpoint": _tcp(ports.take(ranks)),
                "replay_endpoint": _tcp(ports.take(ranks)),
            }
            for name, profile in OUTPUTS
        ]
        overrides: dict[str, Any] = {
            "http": f"{LOOPBACK}:0",
            "worker": "demo",
            # an idle engine is asked soon whether its last batches were lost: nobody wants to watch 5 s of nothing
            "probe_interval": 0.5,
            "sources": sources,
            "outputs": outputs,
        }
        # the demo is the same everywhere: KVBUS_ variables configure `kvbus run`, not this
        config = load(None, env={}, overrides=overrides)
        daemon = Daemon(config)
        await daemon.start()
        self._daemon = daemon
        for name, output in zip("ab", config.outputs, strict=True):
            places = []
            for stream in config.streams():
                at = output.stream_endpoints(stream.index)
                places.append(Place(stream.label, at.endpoint, at.replay_endpoint or ""))
            self.routers.append(Router(f"router-{name}", output.name, places))

    async def close(self) -> None:
        """End everything, in the order in which nobody waits for anybody."""
        for router in self.routers:
            await router.leave()
        if self._daemon is not None:
            daemon, self._daemon = self._daemon, None
            await daemon.close(drain=0)
        for engine in self.engines:
            engine.close()

    # -- playing ---------------------------------------------------------------------------------------------------

    async def play(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        """Play until the time is over or ``stop`` is set; then the engines fall silent."""
        early, late = self.routers
        quiet = asyncio.Event()
        self._serving = [group.create_task(rank.serve(quiet), name=rank.label) for rank in self.ranks]
        early.join(group)
        names = ", ".join(f"{engine.name} ({len(engine.ranks)} ranks)" for engine in self.engines)
        self.story.tell(Tone.SCENE, f"engines {names} start; {early.name} follows")
        labels = [rank.label for rank in self.ranks]
        script = plan(labels, self._seconds, self._seed) if self._script is None else self._script
        for act in script:
            await pause(act.at - self.elapsed(), stop)
            if stop.is_set():
                break
            await self._perform(act, late, group, stop)
        await pause(float("inf") if self._seconds is None else self._seconds - self.elapsed(), stop)
        quiet.set()
        await asyncio.gather(*self._serving)
        if not stop.is_set():
            await self._lose_tail()

    async def settle(self) -> list[str]:
        """Wait until every batch that an engine has published is applied everywhere.

        Returns:
            What is not at rest after `PATIENCE_S`; empty if all is.
        """
        took = await until(lambda: not self._unrest(), PATIENCE_S)
        if took is None:
            return self._unrest()
        self.story.tell(Tone.SCENE, "the engines are silent, and every batch has arrived")
        return []

    def verdict(self, unsettled: Sequence[str] = ()) -> Verdict:
        """Compare every router that is there with every engine's own cache."""
        comparisons = [self._compared(router, i) for router in self.routers if router.joined for i in self._indexes()]
        return Verdict(comparisons, unsettled)

    async def _perform(self, act: Act, late: Router, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        if act.kind is Kind.JOIN:
            await self._join(late, group)
        elif act.kind is Kind.CRASH:
            await self._crash(next(engine for engine in self.engines if engine.name == act.target), stop)
        else:
            i = [rank.label for rank in self.ranks].index(act.target)
            await (self._lose(i, act.count) if act.kind is Kind.LOSE else self._jumble(i, act.count))

    async def _lose(self, i: int, count: int) -> None:
        rank, before = self.ranks[i], self._counts(i)["recovered"]
        self.story.tell(Tone.FAULT, f"{count} live batches of {rank.label} are lost on their way to kvbus")
        rank.lose(count)
        await until(lambda: not rank.misbehaving, PATIENCE_S)
        took = await until(lambda: self._counts(i)["recovered"] - before >= count and self._agree([i]), PATIENCE_S)
        self._told(
            took,
            f"gap seen, {count} replayed by the engine; all equal in {_s(took)}",
            f"the {count} lost batches of {rank.label} did not come back",
        )

    async def _jumble(self, i: int, count: int) -> None:
        rank, before = self.ranks[i], self._counts(i)
        self.story.tell(Tone.FAULT, f"{count} batches of {rank.label} are overtaken by others, {count} come twice")
        rank.jumble(count)
        await until(lambda: not rank.misbehaving, PATIENCE_S)

        def mended() -> bool:
            now = self._counts(i)
            return now["duplicates"] - before["duplicates"] >= count and self._agree([i])

        took = await until(mended, PATIENCE_S)
        self._told(
            took,
            f"order restored, doubles dropped; all equal in {_s(took)}",
            f"the order of {rank.label} was not restored",
        )

    async def _join(self, router: Router, group: asyncio.TaskGroup) -> None:
        if router.joined:
            await router.leave()
            self.story.tell(Tone.FAULT, f"{router.name} restarts and has forgotten everything")
        else:
            sent = sum(rank.next_seq or 0 for rank in self.ranks)
            self.story.tell(Tone.SCENE, f"{router.name} joins late, {sent} batches after the start")
        router.join(group)
        at = [index for index, router_ in enumerate(self.routers) if router_ is router]
        took = await until(lambda: router.rebuilt and self._agree(self._indexes(), at), PATIENCE_S)
        self._told(
            took,
            f"replayed {router.replayed} batches to it; {router.blocks:,} blocks equal in {_s(took)}",
            f"{router.name} could not be rebuilt",
        )

    async def _crash(self, engine: Engine, stop: asyncio.Event) -> None:
        mine = [i for i, rank in enumerate(self.ranks) if rank in engine.ranks]
        before = [self._source(i)["epoch"] for i in mine]
        dead = sum(sum(self._source(i)["blocks"].values()) for i in mine)
        self.story.tell(Tone.FAULT, f"{engine.name} crashes: its cache is gone, its seq begins at 0 again")
        await engine.crash(_DOWNTIME_S, stop)

        def learned() -> bool:
            epochs = [self._source(i)["epoch"] for i in mine]
            return all(now > then for now, then in zip(epochs, before, strict=True)) and self._agree(mine)

        took = await until(learned, PATIENCE_S)
        self._told(
            took,
            f"new epoch: {dead:,} dead blocks cleared, all equal in {_s(took)}",
            f"the new life of {engine.name} was not noticed",
        )

    async def _lose_tail(self) -> None:
        """The hardest loss to see: nothing comes after it."""
        rank, before = self.ranks[0], self._counts(0)["recovered"]
        self.story.tell(Tone.FAULT, f"the last {_TAIL} batches of {rank.label} are lost; none comes after them")
        rank.lose_tail(_TAIL)
        took = await until(lambda: self._counts(0)["recovered"] - before >= _TAIL and self._agree([0]), PATIENCE_S)
        self._told(
            took,
            f"asked the silent engine: {_TAIL} missing; all equal in {_s(took)}",
            f"the last batches of {rank.label} were not missed",
        )

    def _told(self, took: float | None, good: str, bad: str) -> None:
        if took is None:
            self.story.tell(Tone.WRONG, f"{bad} within {PATIENCE_S:.0f} s")
        else:
            self.story.tell(Tone.BUS, good)

    # -- looking ---------------------------------------------------------------------------------------------------

    def observe(self) -> Frame:
        """Everything at this moment: engines, bus and routers share the loop, so nothing moves meanwhile."""
        rates = self._rates()
        config, relay, address = self.daemon.config, self.daemon.relay, self.daemon.http_address
        outputs = []
        for settings, output in zip(config.outputs, relay.outputs, strict=True):
            stats = output.stats
            outputs.append(
                OutputRow(
                    settings.name,
                    f"{settings.profile}, framing {settings.framing}",
                    settings.endpoint,
                    len(output.streams),
                    stats.queue_depth,
                    stats.batches,
                    stats.dropped_batches.total(),
                    stats.subscribers,
                    stats.replay_requests.total(),
                )
            )
        return Frame(
            self.elapsed(),
            self._seconds,
            "" if address is None else f"http://{address[0]}:{address[1]}/",
            [self._source_row(i, rate) for i, rate in enumerate(rates)],
            outputs,
            [self._router_row(r) for r in range(len(self.routers))],
            tuple(self.story.lines),
        )

    def _source_row(self, i: int, rate: float) -> SourceRow:
        seen = self._source(i)
        counts = seen["counts"]
        return SourceRow(
            seen["name"],
            seen["state"],
            seen["epoch"],
            self._dialect(seen["name"], seen["dialect"]),
            rate,
            seen["blocks"],
            counts["missing"],
            counts["recovered"],
            counts["lost"],
            counts["pending"],
        )

    def _router_row(self, r: int) -> RouterRow:
        router = self.routers[r]
        if not router.joined:
            return RouterRow(router.name, router.output)
        cells = [self._cell(feed, r, i) for i, feed in enumerate(router.feeds)]
        return RouterRow(router.name, router.output, cells, router.rebuilt)

    def _cell(self, feed: Feed, r: int, i: int) -> Cell:
        behind = self._behind(r, i)
        if behind is None:
            return Cell(len(feed.view), Match.DOWN)
        if behind:
            return Cell(len(feed.view), Match.BEHIND, behind)
        return Cell(len(feed.view), Match.EQUAL if self._equal(r, i) else Match.DIFFERENT)

    def _dialect(self, label: str, sniffed: str | None) -> str | None:
        """The bus names a batch's dialect; some batches fit several, and the narrowest name says most."""
        known = self._dialects.get(label)
        if sniffed is not None and (known is None or "|" in known):
            self._dialects[label] = known = sniffed
        return known

    def _rates(self) -> list[float]:
        """Live batches a second of each source, over the last seconds."""
        now = self._loop.time()
        counts = [source.stats.batches for source in self.daemon.relay.sources]
        self._seen.append((now, counts))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _RATE_WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        span = now - then
        return [(a - b) / span if span > 0 else 0.0 for a, b in zip(counts, before, strict=True)]

    def _source(self, i: int) -> dict[str, Any]:
        """What ``/sources`` says about one source."""
        return source_json(self.daemon.relay.sources[i], "", None)

    def _counts(self, i: int) -> dict[str, int]:
        counts: dict[str, int] = self._source(i)["counts"]
        return counts

    def _behind(self, r: int, i: int) -> int | None:
        """Batches between what an engine rank has published and what a router has applied, both hops.

        None where numbers say nothing: the engine is away, or the bus does not know its new life yet.
        """
        published, seen = self.ranks[i].next_seq, self._source(i)
        feed = self.routers[r].feeds[i]
        sent = self.daemon.relay.outputs[r].streams[i].next_seq
        if published is None or seen["state"] not in ("live", "gap"):
            return None
        first = published - 1 - int(seen["last_seq"])
        if first < 0:
            return None
        return max(first, int(seen["queue_depth"])) + sent - feed.next_seq

    def _compared(self, router: Router, i: int) -> Comparison:
        feed = router.feeds[i]
        return compare(router.name, feed.source, view_keys(feed.view), truth_keys(self.ranks[i].truth()))

    def _agree(self, sources: Iterable[int], routers: Iterable[int] | None = None) -> bool:
        """Whether nothing is on its way and these routers' views of these sources equal the engines' caches."""
        who = [r for r in (range(len(self.routers)) if routers is None else routers) if self.routers[r].joined]
        pairs = [(r, i) for r in who for i in sources]
        # numbers first: they cost nothing, comparing sets does
        return all(self._behind(r, i) == 0 for r, i in pairs) and all(self._equal(r, i) for r, i in pairs)

    def _equal(self, r: int, i: int) -> bool:
        """`_compared`, done again only when one of the two has changed."""
        feed, version = self.routers[r].feeds[i], self.ranks[i].version
        known = self._agreed.get((r, i))
        if known is not None and known[:3] == (version, feed, feed.updates):
            return known[3]
        equal = self._compared(self.routers[r], i).equal
        self._agreed[r, i] = (version, feed, feed.updates, equal)
        return equal

    def _unrest(self) -> list[str]:
        found = []
        for i, rank in enumerate(self.ranks):
            counts = self._counts(i)
            if counts["pending"]:
                found.append(f"{rank.label}: {counts['pending']} batches pending")
            for r, router in enumerate(self.routers):
                behind = self._behind(r, i) if router.joined else 0
                if behind is None:
                    found.append(f"{rank.label}: {self._source(i)['state']}")
                elif behind or (router.joined and not router.feeds[i].rebuilt):
                    found.append(f"{router.name}: {behind} batches of {rank.label} behind")
        return list(dict.fromkeys(found))

    def _indexes(self) -> range:
        return range(len(self.ranks))


def _tcp(port: int) -> str:
    return f"tcp://{LOOPBACK}:{port}"


def _s(took: float | None) -> str:
    return "" if took is None else f"{took:.2f} s"
