"""The checks of a fault campaign: at every scrape of kvbus's metrics, and after each round."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.chaos.bus import Metrics, total, unaccounted
from tests.chaos.engines import Truth
from tests.chaos.plan import Round

if TYPE_CHECKING:
    from tests.chaos.cell import Cell
    from tests.chaos.routers import Router

PATIENCE: Final = 120.0
"""Maximum seconds until a router has received every batch."""

SETTLE: Final = 15.0
"""Maximum seconds until a router's view is exact, after every batch has arrived at the router."""

LATE: Final = 1.0
"""Maximum seconds from the engine to a healthy router while another router has faults.

On a busy machine the check permits more.
"""

_ROUTER_KINDS: Final = frozenset(
    {
        "stop router",
        "partition",
        "packet loss",
        "link down",
        "stall",
        "half-open",
        "delay",
        "stop kvbus",
        "stop kvbus long",
    }
)

_UNANSWERED_KINDS: Final = frozenset(
    {
        *("kill kvbus", "end kvbus", "stop kvbus", "stop kvbus long", "disk full", "restart on a full disk"),
        *("file size limit", "stall", "half-open", "refuse", "cut", "reset", "delay"),
        *("partition", "packet loss", "link down", "tcp reset"),
    }
)
"""Kinds of faults that make kvbus, or the network to it, unavailable for a while, so that requests get no answer."""


BUSY: Final = 0.5
"""Delay of this process in seconds, above which the machine's load explains unanswered requests."""


@dataclass
class Marks:
    """kvbus's counters at the start of a round, and the kinds of faults since then."""

    metrics: Metrics
    starts: int
    starts_before: int
    """Number of kvbus's starts at the beginning of the previous round.

    A router can reconnect one round after such a start.
    """
    holes: dict[str, int]
    lives: int
    kinds: set[str] = field(default_factory=set)


class Checks:
    """The checks of one cell of the campaign: at each scrape of kvbus's metrics, and after each round."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._tally = cell.tally
        self._starts = 0

    async def begin(self, plan: Round, starts: int) -> Marks:
        cell = self._cell
        report = await cell.bystander.report()
        holes = {name: stream["raw"]["holes"] for name, stream in report.items()}
        metrics = await cell.bus.metrics()
        starts_before, self._starts = self._starts or starts, starts
        return Marks(metrics, starts, starts_before, holes, cell.engine.lives)

    def scrape(self, metrics: Metrics) -> None:
        """Check that ``missing = recovered + lost + pending`` for each source, which must hold at any moment."""
        wrong = unaccounted(metrics)
        self._tally.checks["accounting, at a scrape"] += 1
        if wrong:
            raise AssertionError(f"at a scrape: {'; '.join(wrong)}")

    async def end(self, plan: Round, marks: Marks) -> None:
        """After the round's traffic and faults have ended, check every router's view, every stream and every
        counter of kvbus.
        """
        cell = self._cell
        loop = asyncio.get_running_loop()
        began = loop.time()
        lasts = await cell.engine.last_seqs()
        await self._caught_up(lasts)
        metrics = await cell.bus.metrics()
        reports = [await self._reached(router, metrics) for router in (cell.tried, cell.bystander)]
        recovery = loop.time() - began
        truths = await cell.engine.truths()
        for router, report in zip((cell.tried, cell.bystander), reports, strict=True):
            await self._exact(router, report, truths, marks.kinds)
        self.scrape(metrics)
        self._tally.recovered(marks.kinds, recovery)
        self._tally.rounds += 1
        self._accounts(metrics)
        await self._drained()
        self._monotonic(reports[1], marks)
        if cell.engine.lives == marks.lives:  # kvbus must first find a restarted engine
            self._isolated(plan, reports[1])
        if cell.bus_starts == marks.starts:
            self._deltas(plan, marks, metrics)
        complaints = cell.bus.complaints()
        self._check("no complaint in kvbus's log", not complaints, "; ".join(complaints[:2]))
        self._check(
            "processes alive",
            cell.bus.child.running and cell.tried.child.running and cell.bystander.child.running,
            "a process ended by itself",
        )

    def _check(self, name: str, holds: object, otherwise: str) -> None:
        self._tally.checks[name] += 1
        if not holds:
            raise AssertionError(f"{name}: {otherwise}")

    async def _caught_up(self, lasts: list[int]) -> None:
        """Wait until kvbus has delivered all batches of the engine and counts no source as ``partial``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        while True:
            sources = await self._cell.bus.sources()
            behind = [
                f"{source['name']} {source['state']}, {source['last_seq']} of {last}, pending {source['counts']['pending']}"
                for source, last in zip(sources, lasts, strict=True)
                if source["state"] != "live"
                or source["partial"]
                or source["last_seq"] != last
                or source["counts"]["pending"]
                or source["queue_depth"]
            ]
            if not behind:
                break
            assert loop.time() < end, f"not caught up within {PATIENCE:g} s: {'; '.join(behind)}"
            await asyncio.sleep(0.02)
        self._tally.checks["caught up with the engine"] += len(lasts)

    async def _reached(self, router: Router, metrics: Metrics) -> dict[str, Any]:
        """Wait until a router has every batch and block that kvbus has published, and return the router's report."""
        newest, blocks = metrics["kvbus_output_sequence"], metrics["kvbus_blocks"]
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        while True:
            report = await router.report()
            behind = []
            for name, stream in report.items():
                due = newest[_labels(name)]
                held = sum(view["blocks"] for view in stream["views"].values())
                told = sum(count for labels, count in blocks.items() if _in_stream(name, labels))
                raw = stream["raw"]
                if stream["seq"] < due or (raw["on"] and raw["seq"] < due) or held != told:
                    how = f"seq {stream['seq']} (raw {raw['seq']}) of {due:g}, {held} of {told:g} blocks"
                    behind.append(f"{name}: {how}, {stream['counts']}")
            if not behind:
                return report
            assert loop.time() < end, f"{router.child.name} is not there after {PATIENCE:g} s: {'; '.join(behind)}"
            await asyncio.sleep(0.03)

    async def _exact(self, router: Router, report: dict[str, Any], truths: list[Truth], kinds: set[str]) -> None:
        """Check that each view of a router has the same blocks and tokens as the engine's cache."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SETTLE
        while True:
            wrong = [
                (name, rank, truth)
                for name, stream in report.items()
                for rank, truth in _expected(name, truths)
                if not _same(stream["views"], truth, rank if name == "merged" else None)
            ]
            if not wrong or loop.time() > end:
                break
            await asyncio.sleep(0.1)
            report = await router.report()
        for name, rank, truth in wrong:
            views = await router.dump(name)
            got = views.get(str(rank), set()) if name == "merged" else set().union(*views.values())
            missing, dead = truth.keys - got, got - truth.keys
            difference = f"{len(missing)} of {len(truth.keys)} missing {sorted(missing)[:2]}, {len(dead)} dead {sorted(dead)[:2]}"
            if not missing and not dead:
                difference = "the same blocks with other tokens"
            raise AssertionError(f"{router.child.name} {name}, rank {rank}: {difference}")
        for name, stream in report.items():
            for _, truth in _expected(name, truths):
                self._tally.checks["exact view"] += 1
                self._tally.blocks += len(truth.keys)
            # A router whose requests got no answer reports lost batches, then rebuilds its view and is exact again.
            unanswered = [lost for lost in stream["lost"] if lost.endswith("no_answer")]
            excused = unanswered if kinds & _UNANSWERED_KINDS or self._cell.lag > BUSY else []
            self._tally.given_up += len(excused)
            lost = f"{router.child.name} {name}: {stream['lost']}"
            self._check("no batch lost to a router", stream["lost"] == excused, lost)

    async def _drained(self) -> None:
        """Wait until kvbus has no queued batch for any router.

        The routers may already have all batches from a replay, while the live connection still has queued batches,
        because packets were lost.
        """
        end = asyncio.get_running_loop().time() + PATIENCE
        while queued := total(await self._cell.bus.metrics(), "kvbus_output_queue_depth"):
            if asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(0.1)
        self._check("no queue left", not queued, f"{queued:g} batches")

    def _accounts(self, metrics: Metrics) -> None:
        wrong = unaccounted(metrics)
        self._check("accounting, at rest", not wrong and not total(metrics, "kvbus_source_pending_batches"), f"{wrong}")
        rejected = {key: value for key, value in metrics["kvbus_events_rejected_total"].items() if value}
        self._check("no event refused", not rejected, f"{rejected}")
        sessions = total(metrics, "kvbus_replay_sessions") + total(metrics, "kvbus_replay_waiting")
        # kvbus keeps the session of a vanished router's replay request until it finds the connection broken.
        self._check("replay sessions end", sessions <= 8, f"{sessions:g} sessions")

    def _monotonic(self, report: dict[str, Any], marks: Marks) -> None:
        """Check the live streams as a plain SUB received them.

        Seqs never go back, and seqs are missing only if kvbus was restarted.
        """
        restarted = self._cell.bus_starts != marks.starts_before
        for name, stream in report.items():
            raw = stream["raw"]
            self._check("seq only rises", not raw["back"], f"{name}: {raw['back'][:3]}")
            if not restarted:
                holes = raw["holes"] - marks.holes[name]
                self._check("a healthy router misses nothing", holes == 0, f"{name}: {holes} batches")

    def _isolated(self, plan: Round, report: dict[str, Any]) -> None:
        """Check that a healthy router gets its batches in time while another router has faults."""
        if plan.flavour != "router" or self._cell.shape.engine != "piped":
            return  # the timestamps of recorded batches are old
        late, busy = max(stream["late"] for stream in report.values()), self._cell.lag
        self._tally.latest = max(self._tally.latest, late - busy)
        crowded = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        what = f"a batch was {late:.2f} s late, this process {busy:.2f} s, {crowded:.1f} processes to a core"
        self._check("a stalled router delays no other", late < (LATE + busy) * crowded, what)

    def _deltas(self, plan: Round, marks: Marks, metrics: Metrics) -> None:
        """Check how much the counters of kvbus have grown in this round, if its process was not restarted in it."""

        def more(name: str) -> float:
            return total(metrics, name) - total(marks.metrics, name)

        dropped = metrics["kvbus_output_dropped_batches_total"]
        full = [key for key, value in dropped.items() if key[1] == "queue_full" and value]
        self._check("nothing dropped for a full queue", not full, f"{full}")
        if not marks.kinds & _ROUTER_KINDS:
            slow = more("kvbus_output_dropped_batches_total")
            self._check("nothing dropped without a slow router", not slow, f"{slow:g} batches")
        if plan.flavour == "wire" and self._cell.engine.lives == marks.lives:  # in a first replay none is missing
            wire = [link.wire for link in self._cell.links["live"]]
            gone = sum(len(set(one.dropped)) for one in wire)
            missing, recovered, lost = (
                more(f"kvbus_source_{name}_batches_total") for name in ("missing", "recovered", "lost")
            )
            self._check(
                "each batch dropped on the wire is counted and comes back",
                missing >= gone and recovered == missing and not lost,
                f"{gone} dropped; missing {missing:g}, recovered {recovered:g}, lost {lost:g}",
            )


def _labels(name: str) -> tuple[str, str]:
    output, _, stream = name.partition("/")
    return output, stream or "0"


def _in_stream(name: str, labels: tuple[str, ...]) -> bool:
    """Return whether the stream of kvbus with this name contains the blocks of the source that the labels name.

    The merged stream has all sources; other streams have one rank.
    """
    source = next(label for label in labels if label.startswith("engine"))
    return name == "merged" or (source.partition("/")[2] or "0") == name.partition("/")[2]


def _expected(name: str, truths: list[Truth]) -> list[tuple[int, Truth]]:
    """Return the ranks whose blocks a stream contains, each with the true blocks of this rank."""
    if name == "merged":
        return list(enumerate(truths))
    rank = int(name.partition("/")[2])
    return [(rank, truths[rank])]


def _same(views: dict[str, Any], truth: Truth, rank: int | None) -> bool:
    """Return whether a router's view has exactly the true blocks.

    ``rank`` selects the view of a merged stream; other streams have only one view.
    """
    if rank is None:
        assert len(views) <= 1, f"{sorted(views)} are in the stream of one rank"
        view = next(iter(views.values()), None)
    else:
        view = views.get(str(rank))
    if view is None:
        return not truth.keys
    return view["keys"] == truth.digest and view["tokens"] == truth.tokens
