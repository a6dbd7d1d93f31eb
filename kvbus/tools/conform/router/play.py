"""The player of cases for routers.

It carries out the steps of a case as a simulated engine, and then compares the router's blocks with the engine's cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvbus.client import BlockView, Stored
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.schema import BlockStored
from kvbus.tools.conform.report import Evidence, Outcome, Report, Verdict
from kvbus.tools.conform.router import adapters
from kvbus.tools.conform.router.adapters import Adapter, AdapterError, Stream
from kvbus.tools.conform.router.cases import (
    CASES,
    CLAUSES,
    Again,
    Answers,
    Batch,
    Case,
    Join,
    Message,
    Pause,
    Restart,
    Seen,
    Step,
    as_arrays,
    positional,
)
from kvbus.tools.conform.router.views import Known, Score, Source, View, canonical, score
from kvbus.tools.conform.vectors import CLEARED, Frames, pack, stored
from kvbus.transport.engine.publisher import EnginePublisher

WAYS: Final = ("driver", "view_url", "client")
"""Options of ``kvbus conform router`` that select the adapter. Exactly one of them must be given."""

MARKERS: Final = range(2**40, 2**41)
"""Hashes of marker blocks. If a router holds a marker block, it has read all earlier messages.

The verdict on a router does not consider whether it holds marker blocks.
"""

_NUMBERS: Final = itertools.count()
_TOKENS: Final = 100_000
"""The first token id of marker blocks."""
_ASKED: Final = 4096
"""Maximum number of blocks of one batch for which the router is asked whether it holds them."""


WITHOUT_FAULT: Final = Answers()


@dataclass
class _Rank:
    """The publisher of one rank of the simulated engine, and its state during a case.

    Attributes:
        publisher: the publisher.
        base: first seq of the case or, after a restart, of the epoch.
        framing: number of frames of each message in a replay answer, ``3`` or ``4``.
        numbers: seqs of the batches that were published so far.
        faults: the faults with which the publisher now answers replay requests; none by default.
    """

    publisher: EnginePublisher
    base: int
    framing: str
    numbers: list[int] = field(default_factory=list)
    faults: Answers = WITHOUT_FAULT

    def answer(self, messages: list[Frames]) -> Iterable[Frames]:
        """Return a replay answer with the faults of the case. ``messages`` is the answer without faults.

        The replay thread of the publisher calls this.
        """
        first, late, keep = self.faults
        time.sleep(late)
        kept = messages[:-1]
        if first:
            oldest = self.numbers[first] if first < len(self.numbers) else 2**63
            kept = [each for each in kept if int.from_bytes(each[2], "big") >= oldest]
        if self.framing == "3":
            kept = [[each[0], *each[2:]] for each in kept]
        if keep is not None:
            self.faults = self.faults._replace(keep=None)
            return kept[:keep]
        return [*kept, [b"", END_SEQ, b""] if self.framing == "3" else messages[-1]]


class Engine:
    """The simulated engine of a case. It does what the case's steps say, with one publisher for each rank.

    Args:
        case: the case.
        publishers: a started publisher for each rank.
    """

    def __init__(self, case: Case, publishers: Sequence[EnginePublisher]) -> None:
        self.known: Final[Known] = {}
        self.before_loss: Final[set[int]] = set()
        """Hashes of the blocks that were stored before the last lost batch; empty if no batch is lost."""
        self.markers: Final[set[int]] = set()
        """Hashes of the marker blocks that the last call of `mark` has stored."""
        self.payloads: Final[list[bytes]] = []
        """Payloads of the `Message` steps of the case.

        If the router breaks a clause, they are the evidence in the verdict.
        """
        self._positional: Final = case.arrays
        self._ranks: Final = [_Rank(each, each.next_seq, case.framing) for each in publishers]
        self._asked: Final = sum(each.replay_requests for each in publishers)
        for rank in self._ranks:
            rank.publisher.replay_fault = rank.answer

    @property
    def asked(self) -> int:
        """Number of replay requests that the router has sent in this case."""
        return sum(rank.publisher.replay_requests for rank in self._ranks) - self._asked

    @property
    def subscriptions(self) -> int:
        """Number of subscriptions that all publishers have received so far."""
        return sum(rank.publisher.subscriptions for rank in self._ranks)

    def do(self, step: Step) -> None:
        """Carry out one step of the case."""
        match step:
            case Batch(events, lost, at):
                self._publish(self._ranks[at], pack([time.time(), list(events), at]), lost=lost)
            case Message(frames, lost):
                self._send(frames, lost=lost)
            case Again(batch, at):
                self._ranks[at].publisher.send_again(self._ranks[at].numbers[batch])
            case Restart(at, connected):
                rank = self._ranks[at]
                rank.base, rank.faults = 0, rank.faults._replace(first=0)
                rank.numbers.clear()
                (rank.publisher.renumber if connected else rank.publisher.restart)()
            case Answers():
                self._ranks[0].faults = step

    def mark(self) -> None:
        """Store a marker block in each rank. A router that holds the marker block has read all earlier messages."""
        self.markers.clear()
        for at, rank in enumerate(self._ranks):
            number = next(_NUMBERS)
            marker = MARKERS[number]
            tokens = [_TOKENS + 2 * number, _TOKENS + 2 * number + 1]
            payload = self._pack([stored(marker, token_ids=tokens)], at)
            self._learn(payload)
            self.markers.add(marker)
            rank.publisher.publish(payload)

    def clear(self) -> None:
        """Make the router drop all its blocks, and stop the simulated faults in replay answers.

        A new case can then begin.
        """
        for at, rank in enumerate(self._ranks):
            rank.publisher.replay_fault = list
            rank.publisher.publish(self._pack([CLEARED], at))

    def _pack(self, events: Sequence[Any], rank: int) -> bytes:
        """Return the payload for a marker or a clear. Its events are maps, or arrays if the case uses arrays."""
        return pack([time.time(), [positional(event) if self._positional else event for event in events], rank])

    def _publish(self, rank: _Rank, payload: bytes, *, lost: bool, frames: Frames | None = None) -> None:
        if lost:
            self.before_loss.update(block for block in self.known if block not in MARKERS)
        self._learn(payload)
        seq = None if frames is None else int.from_bytes(frames[1][:8], "big")
        rank.numbers.append(rank.publisher.publish(payload, seq=seq, live=not lost and frames is None))
        if frames is not None and not lost:
            rank.publisher.send_frames(*frames)

    def _send(self, frames: Frames, *, lost: bool) -> None:
        rank = self._ranks[0]
        frames = [rank.publisher.topic or frames[0], *frames[1:]]
        self.payloads.append(frames[-1])
        number = int.from_bytes(frames[1][:8], "big")
        if len(frames) != 3 or len(frames[1]) not in {8, 24} or number >= 2**63:
            rank.publisher.send_frames(*frames)
        elif rank.base + number < rank.publisher.next_seq:
            rank.publisher.send_frames(frames[0], (rank.base + number).to_bytes(8, "big"), frames[2])
        else:
            wide = (rank.base + number).to_bytes(8, "big") + frames[1][8:]
            self._publish(rank, frames[2], lost=lost, frames=[frames[0], wide, frames[2]])

    def _learn(self, payload: bytes) -> None:
        """Remember the parents and tokens of the blocks that a payload stores.

        They are passed to the router with each question, because a router may need them to look up a block.
        """
        batch = decode_batch(payload)
        if isinstance(batch, Reason):
            return
        view = BlockView()
        changes = (change for event in batch.events if isinstance(event, BlockStored) for change in view.apply(event))
        for change in itertools.islice(changes, _ASKED):
            if isinstance(change, Stored) and (tokens := change.block.token_ids):
                parent = None if change.block.parent is None else canonical(change.block.parent)
                source = Source(parent, [_first(token) for token in tokens])
                self.known.setdefault(canonical(change.block.hash), source)


def _first(token: Any) -> int:
    """Return a token id. If ``token`` is a pair of token ids, return the first one.

    The first ids are enough, because the second id of a pair is the first id of the next pair.
    """
    return int(token if isinstance(token, int) else token[0])


_HEARTBEAT_MS: Final = 1000
_POLL_S: Final = 0.05
RIGHT: Final = Score(0, 0)
_ANYWHERE: Final = "tcp://127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class Settings:
    """The endpoints and timeouts with which cases are played to a router.

    Attributes:
        endpoints: live and replay endpoint of each rank's publisher, the same in all cases. Empty if each case has new
            endpoints.
        new_endpoints: function that returns a new live endpoint and a new replay endpoint, if ``endpoints`` is empty.
        streams: streams that the router reads if a program, such as kvbus, is between the publishers and the router;
            otherwise empty.
        topic: topic of all batches.
        settle: settling time: maximum seconds after the last step until the router must hold the right blocks.
        connect: maximum seconds until the router subscribes.
    """

    endpoints: Sequence[tuple[str, str]] = ()
    new_endpoints: Callable[[], tuple[str, str]] = lambda: (_ANYWHERE, _ANYWHERE)
    streams: Sequence[Stream] = ()
    topic: str = ""
    settle: float = 5.0
    connect: float = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of playing a case to a router.

    Attributes:
        outcome: outcome of the case's verdicts.
        message: message of the case's verdicts.
        score: number of missing and dead blocks of the router.
        evidence: payloads of the `Message` steps, if the outcome is ``broken``.
        deaf: whether the router has not subscribed, or has answered no question about its blocks.
    """

    outcome: Outcome
    message: str
    score: Score = RIGHT
    evidence: tuple[Evidence, ...] = ()
    deaf: bool = False


class UntriedError(Exception):
    """A case cannot be played to this router. The text says why."""

    def __init__(self, text: str, *, deaf: bool = False) -> None:
        super().__init__(text)
        self.deaf = deaf


class Player:
    """The player of cases to one router.

    Args:
        adapter: object that starts the router if it can, and that asks it for its blocks.
        settings: the endpoints and timeouts.
    """

    def __init__(self, adapter: Adapter, settings: Settings) -> None:
        self._adapter: Final = adapter
        self._settings: Final = settings
        self._kept: list[EnginePublisher] = []

    async def play(self, case: Case) -> Result:
        """Play a case to the router, and judge the router's blocks after the last step."""
        try:
            self._refuse(case)
            async with self._publishers(case) as publishers:
                engine = Engine(case, publishers)
                try:
                    return await self._played(case, engine, publishers)
                finally:
                    if self._adapter.fresh:
                        await self._adapter.stop()
                    if self._kept:
                        engine.clear()
        except UntriedError as error:
            return Result(Outcome.NOT_SEEN, str(error), deaf=error.deaf)
        except AdapterError as error:
            outcome = Outcome.BROKEN if error.crashed else Outcome.NOT_SEEN
            return Result(outcome, str(error), deaf=not error.crashed)

    def close(self) -> None:
        """Close the publishers that were kept open from case to case."""
        for each in self._kept:
            each.close()

    def _refuse(self, case: Case) -> None:
        kept = self._settings.endpoints
        if case.joins and not self._adapter.fresh:
            raise UntriedError("the case needs a router that kvbus conform starts (--driver)")
        if kept and case.ranks > len(kept):
            raise UntriedError("the case needs a second rank (give --engine once more)")
        if kept and (case.heartbeats or case.first):
            raise UntriedError("the case needs new endpoints (leave out --engine)")

    @contextlib.asynccontextmanager
    async def _publishers(self, case: Case) -> AsyncIterator[list[EnginePublisher]]:
        settings = self._settings
        if settings.endpoints:
            if not self._kept:
                self._kept = [self._publisher(*each) for each in settings.endpoints]
            for publisher in self._kept:
                publisher.start()
            yield self._kept
            return
        heartbeat = _HEARTBEAT_MS if case.heartbeats else 0
        made = [self._publisher(*settings.new_endpoints(), heartbeat) for _ in range(case.ranks)]
        try:
            for publisher in made:
                publisher.start()
            yield made
        finally:
            for publisher in made:
                publisher.close()

    def _publisher(self, live: str, replay: str, heartbeat_ms: int = 0) -> EnginePublisher:
        topic = self._settings.topic.encode()
        return EnginePublisher(live, replay, topic=topic, bind=True, heartbeat_ms=heartbeat_ms)

    async def _played(self, case: Case, engine: Engine, publishers: Sequence[EnginePublisher]) -> Result:
        if not case.joins:
            await self._begin(publishers)
        subscriptions = engine.subscriptions
        for step in case.steps:
            match step:
                case Join():
                    await self._begin(publishers)
                case Seen():
                    engine.mark()
                    if not await self._until(lambda: self._read(engine)):
                        raise UntriedError("the router has not read the batches that the case sends before its fault")
                case Pause(seconds):
                    await asyncio.sleep(seconds)
                case _:
                    engine.do(step)
                    if isinstance(step, Restart):
                        await self._connected(publishers, self._settings.settle)
                    await asyncio.sleep(0)
        if case.marker:
            engine.mark()
        else:
            engine.markers.clear()
        result = await self._judged(case, engine)
        cut = engine.subscriptions - subscriptions
        if case.heartbeats and cut:
            return Result(
                Outcome.BROKEN, f"the publisher closed its connection {cut} times, because no PONG came", result.score
            )
        return result

    async def _begin(self, publishers: Sequence[EnginePublisher]) -> None:
        topic = self._settings.topic
        own = [Stream(each.endpoint, each.replay_endpoint or "", topic) for each in publishers]
        if self._adapter.fresh:
            await self._adapter.start(self._settings.streams[: len(own)] or own)
        if not await self._connected(publishers, self._settings.connect):
            endpoints = ", ".join(each.endpoint for each in publishers)
            raise UntriedError(f"no router subscribes at {endpoints} within {self._settings.connect:g} s", deaf=True)
        if not self._settings.endpoints:
            return
        if not await self._until(self._holds_nothing):
            raise UntriedError("the router holds blocks that were cleared before this case: restart it")

    async def _connected(self, publishers: Sequence[EnginePublisher], seconds: float) -> bool:
        """Wait until the router has subscribed to all publishers. Return False if it has not after ``seconds`` seconds.

        Raises:
            AdapterError: the router ended before it subscribed.
        """

        async def subscribed() -> bool:
            if ended := self._adapter.ended():
                raise AdapterError(f"{ended} before it subscribed")
            return all(each.subscriptions for each in publishers)

        return await self._until(subscribed, seconds)

    async def _until(self, condition: Callable[[], Awaitable[bool]], seconds: float = 0.0) -> bool:
        """Wait until the condition holds. Return False if it does not hold after ``seconds`` seconds.

        If ``seconds`` is 0, wait up to the settling time, in which a router must reach the right blocks.
        """
        deadline = asyncio.get_running_loop().time() + (seconds or self._settings.settle)
        while not await condition():
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _holds_nothing(self) -> bool:
        return not _without_markers(await self._adapter.view({})).held

    async def _read(self, engine: Engine) -> bool:
        """Return whether the router has read all messages that the engine sent before its last marker block."""
        return _has(await self._adapter.view(engine.known), engine.markers)

    async def _judged(self, case: Case, engine: Engine) -> Result:
        """Wait up to the settling time until the router holds the right blocks, and return the result of the case.

        The engine stores a marker block last: a router that holds it has read everything. The kit asks many routers
        about one block after another, so the answers about other blocks of a view may be older than the answer about
        the marker block. Therefore a view counts only if the view before it already had the marker block.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.settle * case.timeouts
        blocks = len(case.cache)
        read = False
        while True:
            timed_out = loop.time() >= deadline
            view, had_read = await self._adapter.view(engine.known), read
            read = _has(view, engine.markers)
            shown = _without_markers(view)
            found = score(case.cache, shown, engine.known)
            if had_read and read and found == RIGHT:
                return Result(Outcome.KEPT, "")
            if timed_out and (had_read or not read):
                break
            await asyncio.sleep(_POLL_S)
        if read and engine.before_loss:
            if shown.incomplete:
                return Result(Outcome.KEPT, "the router reports that its view is incomplete", found)
            if not found.dead and not {block.hash for block in shown.held} & engine.before_loss:
                return Result(Outcome.KEPT, "the router dropped the blocks that it could not repair", found)
        return Result(Outcome.BROKEN, _verdict(found, blocks, engine.asked, read=read), found, _evidence(engine))


def _verdict(found: Score, blocks: int, asked: int, *, read: bool) -> str:
    text = f"its view is not the engine's {blocks} blocks" if any(found) else "its view is right"
    if not read:
        text += ", it reads no further"
    return text + f", it asked for {asked or 'no'} replay{'' if asked == 1 else 's'}"


def _evidence(engine: Engine) -> tuple[Evidence, ...]:
    return tuple(Evidence(f"payload of message {at}", payload) for at, payload in enumerate(engine.payloads[:3]))


def _has(view: View, markers: set[int]) -> bool:
    return markers <= {block.hash for block in view.held}


def _without_markers(view: View) -> View:
    return view._replace(held=frozenset(block for block in view.held if block.hash not in MARKERS))


def chosen(names: Iterable[str]) -> list[Case]:
    """Return the cases with these names, or about clauses with these numbers. Without names, return all cases.

    The simplest case always comes first.

    Raises:
        ValueError: a name is neither a case nor a clause.
    """
    wanted = set(names)
    known = {case.name for case in CASES} | CLAUSES.keys()
    if strange := sorted(wanted - known):
        raise ValueError(f"there is no case and no clause {strange[0]!r} for routers (--list shows all)")
    return [case for at, case in enumerate(CASES)
            if not wanted or not at or case.name in wanted or wanted & set(case.clauses)]  # fmt: skip


async def judge(player: Player, cases: Iterable[Case], report: Report, progress: Callable[[str], object]) -> None:
    """Play the cases to the router, and add their verdicts to the report.

    Stop after the first case if the router does not subscribe in it, or answers no question about its blocks.
    """
    for played, case in enumerate(cases, start=1):
        progress(f"{case.name}: {case.title}")
        result = await player.play(case)
        report.verdicts += _verdicts(case, result)
        report.seen = f"{played} cases"
        if played == 1 and result.outcome is not Outcome.KEPT:
            report.notes.append(f"the view is wrong even without a fault ({result.message}): check the adapter")
            if result.deaf:
                report.tried = False
                return


def _verdicts(case: Case, result: Result) -> list[Verdict]:
    counts = {"missing": result.score.missing, "dead": result.score.dead} if any(result.score) else {}
    return [
        Verdict(
            CLAUSES[number],
            result.outcome,
            f"{case.title}: {result.message}" if result.message else case.title,
            case.level,
            result.evidence,
            case.name,
            counts,
        )
        for number in case.clauses
    ]


_RUNNING = "tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"


def trial(options: Mapping[str, Any], names: Iterable[str] = ()) -> tuple[Player, list[Case], Report]:
    """Return the player, the cases and an empty report for the options of ``kvbus conform router``.

    Args:
        options: the options of the command.
        names: names of cases or numbers of clauses; empty for all cases.

    Raises:
        ValueError: the options contradict each other, or a value is malformed.
    """
    ways = [way for way in WAYS if options[way]]
    if len(ways) != 1:
        raise ValueError(
            "give exactly one of the options that say how to ask the router: "
            + ", ".join("--" + way.replace("_", "-") for way in WAYS)
        )
    reads = options["reads"]
    adapter = _adapter(ways[0], options)
    if reads and not (adapter.fresh and options["engine"]):
        raise ValueError("--reads needs --engine, and --driver or --client")
    engines = options["engine"] or (() if adapter.fresh else (_RUNNING,))
    settings = Settings(
        endpoints=[_pair("--engine", each) for each in engines],
        streams=[adapters.Stream(*_pair("--reads", each), options["topic"]) for each in reads],
        topic=options["topic"],
        settle=options["settle"],
        connect=options["connect"],
    )
    cases = chosen(names)
    if options["arrays"]:
        cases = [as_arrays(case) for case in cases]
    subject = "kvbus.client" if options["client"] else options[ways[0]]
    return Player(adapter, settings), cases, Report("router", subject)


def _adapter(way: str, options: Mapping[str, Any]) -> adapters.Adapter:
    if way == "driver":
        return adapters.Driver(shlex.split(options[way]))
    return adapters.ViewUrl(options[way]) if way == "view_url" else adapters.Client(copies=not options["reads"])


def _pair(option: str, text: str) -> tuple[str, str]:
    live, _, replay = text.partition(",")
    if not live or not replay:
        raise ValueError(f"{option} {text} is not LIVE,REPLAY, such as {_RUNNING}")
    return live, replay
