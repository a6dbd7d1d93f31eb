"""The stage: engines and routers on their ports, the bus between them, and their state for the screen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvbus.common.errors import BindError
from kvbus.config import load
from kvbus.core.sequencing.settings import State
from kvbus.daemon.daemon import Daemon
from kvbus.http.entries import SourceEntry, bare_entry
from kvbus.tools.demo.engines import CAST, Casting, Engine, Rank
from kvbus.tools.demo.keys import Keyring
from kvbus.tools.demo.ports import LOOPBACK, PortRun
from kvbus.tools.demo.routers import DirectFeed, Endpoints, Feed, Router
from kvbus.tools.demo.screen import Cell, Match, RouterRow, Screen, Sent, SourceRow
from kvbus.tools.demo.story import Story
from kvbus.tools.demo.verdict import Comparison, Verdict, compare, truth_keys, view_keys

OUTPUTS: Final = (("dynamo", "dynamo"), ("sgl-router", "sglang"))
"""The bus's outputs: name and profile, which is a family of routers with an encoding and a replay framing."""

_RATE_WINDOW_S: Final = 3.0
_OPEN_TRIES: Final = 5


class Stage:
    """Engines, bus and routers, and a consistent view of all three. It needs a running event loop.

    Args:
        seconds: length of the demo, None for endless.
        seed: seed of the workload.
        cast: the engines, by default `CAST`.
        curve: True uses CURVE on the bus's outputs, with temporary keys.
    """

    def __init__(
        self, *, seconds: float | None, seed: int, cast: Sequence[Casting] | None, curve: bool = False
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time()
        self._seconds = seconds
        self._seed = seed
        self._cast = CAST if cast is None else cast
        self.story: Final = Story(self.elapsed)
        self.engines: list[Engine] = []
        self.ranks: list[Rank] = []
        self.routers: list[Router] = []
        self.direct: list[Router] = []
        """The routers that read the engines themselves: one."""
        self._curve = curve
        self._keys: Keyring | None = None
        self._daemon: Daemon | None = None
        self._dialects: dict[str, str] = {}
        self._seen: deque[tuple[float, list[int]]] = deque()
        self._known: dict[tuple[str, int], tuple[int, Feed, int, Comparison]] = {}

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
        """Build everything on free ports: engines first, then the bus.

        Raises:
            BindError: free ports were taken before the bind, in every attempt.
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
        self.engines, self.ranks, self.routers, own = [], [], [], []
        for casting in self._cast:
            size = len(casting.rates)
            live, replay = ports.take(size), ports.take(size)
            made = [Rank(casting, r, self._seed, _tcp(live + r), _tcp(replay + r)) for r in range(size)]
            engine = Engine(casting, made)
            self.engines.append(engine)
            self.ranks += made
            own += [Endpoints(rank.label, _tcp(live + r), _tcp(replay + r)) for r, rank in enumerate(made)]
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
        if self._curve:
            self._keys = Keyring()
            for section in outputs:
                section.update(self._keys.of_the_bus)
        overrides: dict[str, Any] = {
            "http": f"{LOOPBACK}:0",
            "worker": "demo",
            # ask an idle engine soon for its last batches, so that the demo never shows 5 s of nothing
            "probe_interval": 0.5,
            "sources": sources,
            "outputs": outputs,
        }
        # KVBUS_ variables configure `kvbus run`, not the demo
        config = load(None, env={}, overrides=overrides)
        daemon = Daemon(config, keep_seqs=False)
        await daemon.start()
        self._daemon = daemon
        for name, output in zip("ab", config.outputs, strict=True):
            streams = []
            for stream in config.streams():
                at = output.stream_endpoints(stream.index)
                keys = self._keys.of_a_router if self._keys is not None else None
                streams.append(Endpoints(stream.label, at.endpoint, at.replay_endpoint or "", keys))
            self.routers.append(Router(f"router-{name}", f"kvbus, {output.name}", streams))
        self.direct = [Router("direct", "the engines", own, DirectFeed)]

    async def leave(self) -> None:
        """Let every router leave."""
        for router in (*self.routers, *self.direct):
            await router.leave()

    async def close(self) -> None:
        """Close everything, in an order in which nothing waits for another part."""
        await self.leave()
        if self._daemon is not None:
            daemon, self._daemon = self._daemon, None
            await daemon.close(drain=0)
        for engine in self.engines:
            engine.close()
        if self._keys is not None:
            self._keys.forget()
            self._keys = None

    # -- looking ---------------------------------------------------------------------------------------------------

    def observe(self) -> Screen:
        """Return the state of this moment. Engines, bus and routers share the loop, so nothing changes meanwhile."""
        rates = self._rates()
        address, stats = self.daemon.http_address, self.daemon.output_stats
        sent = Sent(
            sum(each.batches for each in stats),
            sum(each.queue_depth for each in stats),
            sum(each.dropped_batches.total() for each in stats),
            sum(each.replay_requests.total() for each in stats),
        )
        return Screen(
            self.elapsed(),
            self._seconds,
            "" if address is None else f"http://{address[0]}:{address[1]}/",
            [self._source_row(i, rate) for i, rate in enumerate(rates)],
            sent,
            [*(self._router_row(r) for r in range(len(self.routers))), *map(self._direct_row, self.direct)],
            tuple(self.story.lines),
        )

    def verdict(self, unsettled: Sequence[str] = ()) -> Verdict:
        """Compare every running router with every engine's own cache."""
        comparisons = [self._compared(router, i) for router in self.routers if router.joined for i in self._indexes()]
        direct = [self._compared(router, i) for router in self.direct if router.joined for i in self._indexes()]
        return Verdict(comparisons, unsettled, direct)

    def _source_row(self, i: int, rate: float) -> SourceRow:
        seen = self._source(i)
        dialect = self._dialect(seen.name, seen.dialect)
        return SourceRow(seen.name, seen.state, seen.epoch, dialect, rate, seen.blocks, seen.counts)

    def _router_row(self, r: int) -> RouterRow:
        router = self.routers[r]
        if not router.joined:
            return RouterRow(router.name, router.reads)
        return RouterRow(router.name, router.reads, [self._cell(r, i) for i in self._indexes()], router.rebuilt)

    def _direct_row(self, router: Router) -> RouterRow:
        """Return the row of a router of whose batches nobody knows which are on their way."""
        cells = [self._judged(router, i) for i in self._indexes()] if router.joined else []
        return RouterRow(router.name, router.reads, cells, direct=True)

    def _cell(self, r: int, i: int) -> Cell:
        behind, router = self._behind(r, i), self.routers[r]
        if behind == 0:
            return self._judged(router, i)
        blocks = len(router.feeds[i].view)
        return Cell(blocks, Match.DOWN) if behind is None else Cell(blocks, Match.BEHIND, behind)

    def _judged(self, router: Router, i: int) -> Cell:
        found = self._compared(router, i)
        match = Match.EQUAL if found.equal else Match.DIFFERENT
        return Cell(len(router.feeds[i].view), match, missing=len(found.missing), dead=len(found.dead))

    def _dialect(self, label: str, sniffed: str | None) -> str | None:
        """Return a source's dialect. A batch may fit several dialects, so keep the narrowest name that the bus gave."""
        known = self._dialects.get(label)
        if sniffed is not None and (known is None or "|" in known):
            self._dialects[label] = known = sniffed
        return known

    def _rates(self) -> list[float]:
        """Return the live batches per second of each source, over the last seconds."""
        now = self._loop.time()
        counts = [source.stats.batches for source in self.daemon.relay.sources]
        self._seen.append((now, counts))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _RATE_WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        span = now - then
        return [(a - b) / span if span > 0 else 0.0 for a, b in zip(counts, before, strict=True)]

    def _source(self, i: int) -> SourceEntry:
        """Return the entry of ``/sources`` for one source."""
        return bare_entry(self.daemon.relay.sources[i])

    def _behind(self, r: int, i: int) -> int | None:
        """Count the batches that an engine rank has published and a router has not applied, over both hops.

        Returns:
            None while the engine is down, or the bus does not know its new epoch yet.
        """
        published, seen = self.ranks[i].next_seq, self._source(i)
        feed = self.routers[r].feeds[i]
        sent = self.daemon.relay.outputs[r].streams[i].next_seq
        if published is None or seen.state not in (State.LIVE, State.GAP):
            return None
        first = published - 1 - seen.last_seq
        if first < 0:
            return None
        return max(first, seen.queue_depth) + sent - feed.next_seq

    def _compared(self, router: Router, i: int) -> Comparison:
        """Compare a router's view with an engine's cache; the result is kept until one of the two changes."""
        feed, version = router.feeds[i], self.ranks[i].version
        known = self._known.get((router.name, i))
        if known is not None and known[:3] == (version, feed, feed.updates):
            return known[3]
        found = compare(router.name, feed.source, view_keys(feed.view), truth_keys(self.ranks[i].truth()))
        self._known[router.name, i] = (version, feed, feed.updates, found)
        return found

    def _heard(self) -> bool:
        """Return whether the direct router has what is on the engines' live streams."""
        pairs = [(rank, feed) for router in self.direct for rank, feed in zip(self.ranks, router.feeds, strict=True)]
        return all(rank.last_live in (-1, feed.next_seq - 1) for rank, feed in pairs)

    def _agree(self, sources: Iterable[int], routers: Iterable[int] | None = None) -> bool:
        """Return whether no batch is on its way and these routers' views equal the engines' caches."""
        who = [r for r in (range(len(self.routers)) if routers is None else routers) if self.routers[r].joined]
        pairs = [(r, i) for r in who for i in sources]
        # compare numbers first, because comparing sets is expensive
        return all(self._behind(r, i) == 0 for r, i in pairs) and all(
            self._compared(self.routers[r], i).equal for r, i in pairs
        )

    def _unrest(self) -> list[str]:
        found = []
        for i, rank in enumerate(self.ranks):
            pending = self._source(i).counts.pending
            if pending:
                found.append(f"{rank.label}: {pending} batches pending")
            for r, router in enumerate(self.routers):
                behind = self._behind(r, i) if router.joined else 0
                if behind is None:
                    found.append(f"{rank.label}: {self._source(i).state}")
                elif behind or (router.joined and not router.feeds[i].rebuilt):
                    found.append(f"{router.name}: {behind} batches of {rank.label} behind")
        return list(dict.fromkeys(found))

    def _indexes(self) -> range:
        return range(len(self.ranks))


def _tcp(port: int) -> str:
    return f"tcp://{LOOPBACK}:{port}"
