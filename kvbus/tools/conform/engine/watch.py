"""The watch of a running publisher. It subscribes, requests missing batches, and passes all messages to the judge."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from kvbus.config.endpoints import parse_endpoint
from kvbus.core.types import Refused
from kvbus.tools.conform.engine.clauses import Ledger
from kvbus.tools.conform.engine.judge import EngineJudge, View, judge_late
from kvbus.tools.conform.engine.probes import Api, Asking, Target
from kvbus.tools.conform.engine.stream import Message, parse
from kvbus.tools.conform.report import Report
from kvbus.transport.client.subscriber import StreamSockets
from kvbus.transport.dialling import dial
from kvbus.transport.reach import Outcome, Stop
from kvbus.transport.zmtp.mechanism import Role

_TICK_S: Final = 0.1
_DIAL_S: Final = 5.0
_CONNECT_S: Final = 10.0
LATE_S: Final = 3.0
"""Seconds for which the kit collects the messages of a second subscriber, which subscribes while blocks are live."""
_PING: Final = b"\x04PING"


class Tap:
    """A subscription to a publisher, with a queue of its messages and of the changes of its connection."""

    def __init__(self, target: Target) -> None:
        self.queue: Final[deque[list[bytes] | bool]] = deque()
        """Messages and changes of the connection, in order. True is a new connection, False a lost connection."""
        self.arrived: Final = asyncio.Event()
        self.sockets: Final = StreamSockets(
            target.endpoint, None, handler=self, topic=target.topic, bind=target.bind, curve=target.curve
        )

    async def __aenter__(self) -> Self:
        self.sockets.open()
        self.sockets.read(on=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sockets.aclose()

    def on_live(self, frames: list[bytes]) -> None:
        """Put a live message into the queue of messages and connection changes, from which the watch reads."""
        self.queue.append(frames)
        self.arrived.set()

    def on_connection(self, up: bool) -> None:
        """Put a new (``up``) or a lost connection into the queue from which the watch reads."""
        self.queue.append(up)
        self.arrived.set()

    def on_refused(self, reason: Refused) -> None:
        """Do nothing, because `Watch` has dialled the publisher before, and has reported if it refuses connections."""

    def on_replayed(self, frames: list[bytes]) -> None:
        """Do nothing: no replay answer can arrive, because these sockets request none."""

    def on_snapshot(self, frames: list[bytes]) -> None:
        """Do nothing: no snapshot can arrive, because these sockets request none."""


class Watch:
    """The watch of one publisher. `run` watches it for some time, and `report` returns the verdicts so far."""

    def __init__(self, target: Target, progress: Callable[[str], None] = lambda _: None) -> None:
        self.judge: Final = EngineJudge(target.rank)
        self._target = target
        self._progress = progress
        self._asking = Asking(self.judge, target)
        self._notes: list[str] = []
        self.connected = False
        """Whether the connection was up when the last message was processed."""
        self._steady = False
        """Whether the connection has been up without interruption since the last batch was received."""
        self._ups = 0
        self._judged = False
        """Whether at least one clause was judged although the live stream could not be watched."""
        self._doing = "connecting"
        self._others: dict[int, bytes] | None = None
        """By seq: payloads that this subscriber received while a late subscriber is compared with it.

        It is None while no late subscriber is compared.
        """

    def report(self) -> Report:
        """Return a report with the verdicts of the watch so far."""
        judge = self.judge
        seen = f"{judge.batches:,} batches, {judge.events:,} events"
        tried = self._judged or self._ups > 0
        verdicts = judge.verdicts() if tried else []
        return Report("engine", self._target.endpoint, verdicts, seen, tried=tried, notes=self._notes)

    async def run(self) -> None:
        """Watch the publisher until the watching time has passed and all probes have ended.

        The probes are prompts to the engine, replay and snapshot requests, and a second subscription.
        """
        target = self._target
        if not target.bind and not await self._look():
            return
        async with Tap(target) as tap:
            if not await self._until_connected(tap):
                self._notes.append(f"no connection to {target.endpoint} within {_CONNECT_S:g} s")
                return
            pinged = asyncio.ensure_future(self._unanswered_pings())
            try:
                await self._begin()
                await self._watch(tap)
            finally:
                pinged.cancel()
                await asyncio.gather(pinged, return_exceptions=True)

    async def _look(self) -> bool:
        """Connect to the publisher once with kvbus's own ZMTP code, and judge its socket type and its security.

        Return whether the publisher can be watched.
        """
        endpoint, ledger = self._target.endpoint, self.judge.ledger
        async with dial(endpoint, Role.SUB, seconds=_DIAL_S, curve=self._target.curve) as dialled:
            outcome = dialled.outcome
        if outcome.stop is not Stop.OPEN:
            self._notes.append(outcome.sentence)
            return False
        found = outcome.no_publisher()
        if found or outcome.version < (3, 0):
            ledger.broken("1.1", found.text if found else f"{endpoint} speaks ZMTP {outcome.version}")
            self._judged = True
            return False
        ledger.kept("1.1")
        self._keys(outcome)
        return True

    def _keys(self, outcome: Outcome) -> None:
        if outcome.mechanism == "CURVE":
            self.judge.ledger.kept("14.1")
        elif not parse_endpoint(self._target.endpoint).is_loopback:
            self.judge.ledger.broken("14.1", f"{self._target.endpoint} accepts every peer without CURVE")

    async def _until_connected(self, tap: Tap) -> bool:
        try:
            async with asyncio.timeout(_CONNECT_S if not self._target.bind else self._target.seconds):
                while not self._ups:
                    await self._take(tap)
        except TimeoutError:
            return False
        return True

    async def _begin(self) -> None:
        self._doing = "asking for the history"
        answer = await self._asking.ask(0)
        if answer is not None:
            self.judge.begin(answer)

    async def _watch(self, tap: Tap) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._target.seconds
        probing = asyncio.ensure_future(self._probe())
        try:
            while loop.time() < end or not probing.done() or (self._target.await_restart and not self.judge.restarts):
                self._say(max(0.0, end - loop.time()))
                await self._take(tap)
            await probing
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _take(self, tap: Tap) -> None:
        """Process the next message or connection change. If there is none, wait up to `_TICK_S` seconds for one."""
        if not tap.queue:
            tap.arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(tap.arrived.wait(), _TICK_S)
            if not tap.queue:
                if self.connected:
                    self.judge.silence.passed(_TICK_S)
                return
        received = tap.queue.popleft()
        if isinstance(received, bool):
            await self._connection(received)
        else:
            await self._message(received)
        await asyncio.sleep(0)

    async def _message(self, frames: list[bytes]) -> None:
        message = self.judge.parse(frames)
        if message is None:
            return
        gap = self.judge.gap_before(message)
        if gap is not None:
            # Request also the batch before the gap, which certainly exists. If the answer has this batch, but skips a
            # seq after it, a batch with that seq was never sent.
            answer = await self._asking.ask(max(0, gap - 1))
            if answer is not None:
                self.judge.fill(message, answer)
        if not self._steady:
            self.judge.welcome(message)
        self.judge.take(message, connected=self._steady)
        self._steady = True
        if self._others is not None:
            self._others[message.seq] = message.payload

    async def _connection(self, up: bool) -> None:
        self.connected, self._steady = up, False
        if not up:
            return
        self._ups += 1
        if self._ups > 1:
            self.judge.reconnected(await self._asking.ask(0))

    async def _probe(self) -> None:
        if self._target.api is not None:
            self._doing = "sending prompts"
            await Api(self.judge, self._target, self._notes).provoke()
        else:
            await asyncio.sleep(self._target.seconds / 2)
        self._doing = "asking for replays"
        await self._asking.probe(lambda: self.judge.batches)
        await self._asking.snapshot()
        self._doing = "subscribing a second time"
        await self._late()
        self._doing = "watching"

    async def _late(self) -> None:
        """Subscribe a second time while blocks are live, and judge by clauses 5.1 to 5.4 which messages come."""
        if not len(self.judge.stream.blocks) or self._target.bind:
            return
        self._others = {}
        async with Tap(self._target) as late:
            await asyncio.sleep(LATE_S)
            joined, live = await self._at_one(late)
            others, self._others = self._others, None
            state = judge_late(self.judge.ledger, joined, others, live)
        if state > 1 and self._target.replay is not None:
            answer = await self._asking.ask(joined[0].seq + 1)
            first = answer.batches[0] if answer is not None and answer.batches else None
            wrong = "a replay from inside a state did not have the state"
            if first is None:
                self.judge.ledger.broken("5.3", wrong)
            else:
                self.judge.ledger.judge("5.3", "" if first.clears_first else wrong, first.evidence)

    async def _at_one(self, late: Tap) -> tuple[list[Message], View | None]:
        """Wait up to `LATE_S` seconds until the late subscriber has received the same batches as the first subscriber.

        Return the messages of the late subscriber, and the blocks that are live after them. The blocks are None if the
        wait timed out.
        """
        joined: list[Message] = []
        end = asyncio.get_running_loop().time() + LATE_S
        while True:
            frames = [each for each in late.queue if not isinstance(each, bool)]
            joined += [found for each in frames if (found := parse(each, Ledger()))]
            late.queue.clear()
            stream = self.judge.stream
            if not joined or joined[-1].seq + 1 == stream.expected:
                return joined, stream.blocks.live
            if asyncio.get_running_loop().time() > end:
                return joined, None
            await asyncio.sleep(0.01)

    async def _unanswered_pings(self) -> None:
        """Leave PINGs unanswered, and judge by clause 1.5 whether the publisher then closes the connection."""
        if self._target.curve is not None or self._target.bind:
            return
        ledger, endpoint = self.judge.ledger, self._target.endpoint
        async with dial(endpoint, Role.SUB, seconds=_DIAL_S) as dialled:
            connection = dialled.connection
            if connection is None:
                return
            pings = 0
            while data := await connection.receive_raw():
                pings += data.count(_PING)
                ledger.kept("1.5", data.count(_PING))
            if pings and self.connected:
                ledger.broken("1.5", "the connection was closed after a PING without a PONG")

    def _say(self, left: float) -> None:
        judge = self.judge
        self._progress(f"{self._doing}: {judge.batches:,} batches, {len(judge.stream.blocks):,} blocks, {left:.0f} s")
