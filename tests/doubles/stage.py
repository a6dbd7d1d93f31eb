"""A relay without sockets or a clock, and routers that read their simulated connections step by step.

A test decides what each engine publishes, and when each router reads, loses its connection or is slow. The routers are
the families of docs/INTEROP.md. `Trusting` applies every batch, like llm-d without replay. `Checking` drops batches that
it has seen and requests missing batches, like Dynamo's indexer. `Llmd` follows the rules of llm-d with replay.
`test_conversations` compares them with recordings of these programs. `FromZero` requests a replay whenever it connects,
which no known program does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvbus.core.blocks import compaction
from kvbus.core.commands import AnswerReplay, Command, Publish, SendState
from kvbus.core.events import BatchReceived, RelayEvent, ReplayAsked, SourceDown, SourceUp, Subscribed, Tick
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import medium_key
from kvbus.core.wire.frames import END_SEQ
from tests.doubles.answers import AnswerReader, StateReader, reading
from tests.doubles.llmd import Answered, Asking, LlmdRules
from tests.doubles.payloads import batch, unpack
from tests.doubles.router import RankedRouter

Place = tuple[int, int]
"""A stream of the relay: the index of its output, and the index of the stream within the output."""


def cut_states(patch: pytest.MonkeyPatch, blocks: int, most: int | None = None) -> None:
    """Make kvbus split a state into batches of ``blocks`` blocks, so that small states have several batches.

    If these batches need more seqs than the state may use, a batch has up to ``most`` blocks.
    """
    patch.setattr(compaction, "BLOCKS_PER_BATCH", blocks)
    if most is not None:
        patch.setattr(compaction, "MOST_BLOCKS", most)


def keys_of(event: dict[str, Any], rank: int) -> list[tuple[Any, ...]]:
    """Return the keys of all blocks that an event names. A key has rank, group, medium key and hash."""
    group, medium = event.get("group_idx"), medium_key(event.get("medium"))
    return [(rank, group, medium, block) for block in event["block_hashes"]]


class Connection:
    """The unread content of a router's socket: batches, then a state, and the live batches after it.

    Only a router that gets the state again has batches before the state.
    """

    def __init__(self, number: int, place: Place) -> None:
        self.number, self.place = number, place
        self.waiting = True
        """Whether the router has not got the state of its subscription yet."""
        self.again = False
        """Whether the router gets the state again, after the batches that are queued for it."""
        self.earlier: deque[tuple[int, bytes]] = deque()
        self.reader: StateReader | None = None
        self.live: deque[tuple[int, bytes]] = deque()

    def published(self, seq: int, payload: bytes) -> None:
        if not self.waiting and (self.reader is None or seq >= self.reader.transfer.end_seq):
            self.live.append((seq, payload))

    def begin(self, reader: StateReader) -> None:
        """Queue a state. A router that gets it for the first time, or after a loss, gets no earlier batch."""
        size = reader.transfer.end_seq - reader.transfer.first_seq
        if self.again and not self.waiting:
            self.earlier.extend([*self.live][: len(self.live) - size])  # without those in place of the state
        self.live.clear()
        self.waiting, self.again, self.reader = False, False, reader

    def next(self) -> tuple[int, bytes] | None:
        if self.earlier:
            return self.earlier.popleft()
        reader = self.reader
        while reader is not None and not reader.done:
            found = reader.next_batch()
            if found is not None:
                return found
        return self.live.popleft() if self.live else None


class Counting(RankedRouter):
    """A router that keeps a plain set for each rank, and also counts the stores minus the removals of each block."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(first)
        self.counts: Counter[Any] = Counter()

    def take(self, payload: bytes) -> None:
        super().take(payload)
        _, events, rank = unpack(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.counts = Counter({key: n for key, n in self.counts.items() if key[0] != rank})
                continue
            for key in keys_of(event, rank):
                self.counts[key] += 1 if event["type"] == "BlockStored" else -1

    def holds(self, expected: set[Any]) -> None:
        """Check that the router holds exactly the expected blocks, and that each was stored exactly once more than
        removed.
        """
        assert self.blocks == expected
        assert {key: n for key, n in self.counts.items() if n} == dict.fromkeys(expected, 1)


class Trusting:
    """A router that applies every batch in the order of arrival."""

    def __init__(self, place: Place = (0, 0)) -> None:
        self.place = place
        self.views = Counting()
        self.connection: Connection | None = None

    def connect(self, stage: Stage) -> None:
        self.connection = stage.connect(self.place)

    def cut(self, stage: Stage) -> None:
        """Break the router's connection. The unread content of its socket is lost."""
        if self.connection is not None:
            stage.connections.remove(self.connection)
        self.connection = None

    def take(self, stage: Stage) -> bool:
        """Read one message. Return False if there is no message."""
        message = None if self.connection is None else self.connection.next()
        if message is None:
            return False
        self.receive(stage, *message)
        return True

    def receive(self, stage: Stage, seq: int, payload: bytes) -> None:
        del stage, seq
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        self.views.take(payload)

    def holds(self, expected: set[Any]) -> None:
        self.views.holds(expected)


class Checking(Trusting):
    """A router that drops batches that it has seen, and requests missing batches by a replay."""

    def __init__(self, place: Place = (0, 0)) -> None:
        super().__init__(place)
        self.next = 0
        self.cut_after = -1
        """Number of messages after which the connection of the next replay answer breaks; -1 means that it does not
        break.
        """

    def receive(self, stage: Stage, seq: int, payload: bytes) -> None:
        if seq > self.next:
            self.replay(stage)
        self.accept(seq, payload)

    def accept(self, seq: int, payload: bytes) -> None:
        if seq >= self.next:
            self.apply(payload)
            self.next = seq + 1

    def replay(self, stage: Stage) -> None:
        for seq, payload in stage.replay(self.place, self.next):
            if self.cut_after == 0:
                self.cut_after = -1
                self.cut(stage)
                return
            self.cut_after -= self.cut_after > 0
            self.accept(seq, payload)


class FromZero(Checking):
    """A router that requests a replay whenever it connects: the first time from 0, later from its next seq."""

    def connect(self, stage: Stage) -> None:
        super().connect(stage)
        self.replay(stage)


class UnfinishedError(Exception):
    """A replay answer broke off before its END, after ``batches``."""

    def __init__(self, batches: list[tuple[int, bytes]]) -> None:
        super().__init__()
        self.batches = batches


class Llmd(Trusting):
    """llm-d's subscriber with replay. See :class:`tests.doubles.llmd.LlmdRules`."""

    def __init__(self, place: Place = (0, 0)) -> None:
        super().__init__(place)
        self.now = 0.0
        self.rules = LlmdRules(lambda: self.now, lambda _, payload: self.apply(payload), self._forget)
        self.unreachable = 0
        """Number of replay requests that get no answer from now on."""

    def _forget(self) -> None:
        self.views = Counting()

    def connect(self, stage: Stage) -> None:
        super().connect(stage)
        self._step(stage, self.rules.connected())

    def receive(self, stage: Stage, seq: int, payload: bytes) -> None:
        self._step(stage, self.rules.live(seq, payload))

    def _step(self, stage: Stage, step: Asking) -> None:
        try:
            start = next(step)
            while True:
                self.unreachable -= self.unreachable > 0
                lost = self.unreachable > 0
                routers = () if self.connection is None else (self.connection.number,)
                start = step.send(Answered([], ended=False) if lost else self._ask(stage, start, routers))
        except StopIteration:
            return

    def _ask(self, stage: Stage, start: int, routers: tuple[int, ...]) -> Answered:
        try:
            return Answered(stage.replay(self.place, start, routers))
        except UnfinishedError as error:
            return Answered(error.batches, ended=False)


FAMILIES: list[type[Trusting]] = [Trusting, Checking, FromZero]

_OF_ROUTERS = {"send", "connect", "break", "cut", "new", "lose", "take"}
"""Names of the script steps that a router executes. All other steps are methods of `Stage`."""


class Stage:
    """A relay with engines that answer no replay request, and substitutes for the sockets, which execute the
    relay's commands.
    """

    def __init__(self, sources: Sequence[SourceSpec], outputs: Sequence[OutputSpec]) -> None:
        self.specs = list(sources), list(outputs)
        self.now = 0.0
        self.relay = Relay(*self.specs)
        self.said = [0] * len(sources)
        """Seq of each engine's newest batch.

        The first batch has seq 1, because kvbus treats a clear in batch 0 as SGLang's.
        """
        self.connections: list[Connection] = []
        self.numbers = 0
        for i in range(len(sources)):
            self.handle(SourceUp(i))

    # -- the shell ---------------------------------------------------------------------------------------------------

    def handle(self, event: RelayEvent) -> list[AnswerReader]:
        """Pass an event to the relay and execute the relay's commands.

        Return a reader for each replay answer that the commands begin.
        """
        return self.carry_out(self.relay.handle(event, self.now))

    def carry_out(self, commands: Iterable[Command]) -> list[AnswerReader]:
        answers: list[AnswerReader] = []
        for command in commands:
            if isinstance(command, Publish):
                self.published(command)
                for connection in self.connections:
                    if connection.place == (command.output, command.stream):
                        connection.published(command.seq, command.payload)
            elif isinstance(command, SendState):
                for connection in self.connections:
                    if connection.number in command.routers:
                        connection.begin(StateReader(command.transfer))
            elif isinstance(command, AnswerReplay):
                for connection in self.connections:
                    connection.again |= connection.number in command.again
                answers.append(reading(self.relay, command, self.carry_out))
        return answers

    def published(self, command: Publish) -> None:
        """Do nothing. Subclasses override this method, which gets each batch that the relay publishes."""

    # -- routers -----------------------------------------------------------------------------------------------------

    def connect(self, place: Place) -> Connection:
        self.numbers += 1
        self.connections.append(Connection(self.numbers, place))
        return self.connections[-1]

    def send_states(self, place: Place | None = None) -> None:
        """Send a state to all routers that wait for one, on one stream or, by default, on every stream."""
        for at in dict.fromkeys(connection.place for connection in self.connections):
            there = [each for each in self.connections if each.place == at]
            idle = [each for each in there if not each.earlier and (each.reader is None or each.reader.done)]
            waiting = tuple(each.number for each in there if each.waiting or (each.again and each in idle))
            if waiting and place in (None, at):
                self.handle(Subscribed(*at, waiting))

    def lose(self, connection: Connection) -> None:
        """Drop the live batches that a router has not read, so that the router gets the state again."""
        connection.earlier.clear()
        connection.live.clear()
        connection.waiting, connection.again, connection.reader = True, False, None

    def replay(self, place: Place, start: int, routers: tuple[int, ...] = ()) -> list[tuple[int, bytes]]:
        """Request a replay of a stream from the seq ``start``, and return the batches of the answer.

        ``routers`` are the numbers of the connections that have the requester's address.
        """
        frames = [b"id", b"", start.to_bytes(8, "big")]
        (answer,) = self.handle(ReplayAsked(*place, frames, routers))
        found = []
        while (message := answer.next_message()) is not None:
            if message and message[-2] != END_SEQ:
                found.append((int.from_bytes(message[-2], "big"), message[-1]))
        return found

    # -- engines -----------------------------------------------------------------------------------------------------

    def send(self, source: int, *events: Any, rank: int = 0) -> None:
        """Publish a batch with these events as the engine of a source."""
        self.said[source] += 1
        self.handle(BatchReceived(source, batch(self.said[source], *events, rank=rank)))

    def say(self, source: int, wanted: Any) -> None:
        """Execute a script step of an engine. Subclasses define what such a step contains."""
        raise NotImplementedError

    def lose_batch(self, source: int) -> None:
        """Skip a seq of an engine, as if its batch were lost. The relay notices the gap at the engine's next batch."""
        self.said[source % len(self.said)] += 1

    def restart_engine(self, source: int) -> None:
        """Restart an engine: end its connection and connect a new process that numbers its batches from the start."""
        source %= len(self.said)
        self.handle(SourceDown(source))
        self.said[source] = 0
        self.handle(SourceUp(source))

    def beat(self, _: int = 0) -> None:
        self.handle(Tick(self.now))

    # -- scripts -----------------------------------------------------------------------------------------------------

    def play(self, routers: list[Any], steps: Iterable[tuple[str, int, Any]]) -> None:
        """Execute a script. A step has the name of a method, the index of the engine or router, and a count or
        events.
        """
        for what, which, more in steps:
            if what == "say":
                self.say(which, more)
                continue
            if what not in _OF_ROUTERS:
                getattr(self, what)(which)
                continue
            router = routers[which]
            if what == "send":
                self.send_states(router.place)
            elif what == "connect" and router.connection is None:
                router.connect(self)
            elif what == "break" and isinstance(router, Checking):
                router.cut_after = more
            elif what in ("cut", "new"):
                router.cut(self)
                if what == "new":
                    routers[which] = type(router)(router.place)
            elif what == "lose" and router.connection is not None:
                self.lose(router.connection)
            elif what == "take":
                for _ in range(more):
                    router.take(self)

    def connect_all(self, routers: list[Any]) -> None:
        """End all faults: connect every router, and send states to the routers that wait for one."""
        for router in routers:
            if isinstance(router, Checking):
                router.cut_after = -1
            while router.connection is None:
                router.connect(self)
        self.send_states()

    def read_all(self, routers: list[Any]) -> None:
        for router in routers:
            while router.take(self):
                pass
