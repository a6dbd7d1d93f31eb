"""Functions to write tests of the relay as a conversation: ``script >> an event << the commands that the relay
returns``.

::

    assert (
        Script(replay=True)
        >> up()
        << ask(0)
        >> replay_end()
        >> live(0, store([1, 2]))
        << publish(0, store([1, 2]))
    )

A script fails if a command is not named before the next event. The failure prints the conversation so far, the expected
command and the actual one. ``script.after(live(0), live(1))`` returns the commands of several events. ``script.router``
is a router's set of blocks, to which everything published was applied.

A :class:`~tests.core.sequencing.script.SequencerScript` has the same conversation with a sequencer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

from kvbus.core.commands import AnswerReplay, CancelReplay, Command, Publish, RequestReplay, RequestSnapshot
from kvbus.core.events import (
    BatchReceived,
    RelayEvent,
    ReplayAborted,
    ReplayAsked,
    ReplayReceived,
    SnapshotReceived,
    SourceDown,
    SourceUp,
    Tick,
    Unread,
)
from kvbus.core.normalizing.normalizer import Normalizer
from kvbus.core.outputs.spec import OutputSpec, Rights
from kvbus.core.relay import Relay
from kvbus.core.sequencing.actions import Action, Ask, AskSnapshot, Stop
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.wire.codec import AnyEvent, decode
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import PROFILES
from kvbus.core.wire.schema import Batch
from tests.doubles.accounting import all_accounted_for, size_is_true
from tests.doubles.answers import AnswerReader, reading
from tests.doubles.payloads import batch, payload, plain_all, short, unpack
from tests.doubles.router import PlainSetRouter

# -- a normalizer on its own -------------------------------------------------------------------------------------------


EVERYTHING = Rights()


class Bench:
    """A normalizer, and a router that applies the normalizer's events to a plain set of blocks."""

    def __init__(self, **rules: Any) -> None:
        self.stats = SourceStats()
        self.normalizer = Normalizer(SourceSpec(**rules), self.stats)
        self.router = PlainSetRouter()
        self.seq = 0
        self.left: list[AnyEvent] = []
        """The events that the normalizer returned for the last batch."""

    def feed(self, *events: Any, raw: bytes | None = None, first_of_epoch: bool = False) -> list[dict[str, Any]]:
        """Apply one batch, and return the outgoing events as :func:`plain` maps."""
        batch = payload(*events) if raw is None else raw
        decoded = decode(batch)
        assert isinstance(decoded, Batch), decoded
        out = self.left = self.normalizer.apply(decoded, first_of_epoch=first_of_epoch)
        size_is_true(self.normalizer)
        self.router.apply(self.seq, payload(*out))
        self.seq += 1
        return plain_all(out)

    def restart(self) -> None:
        """Continue with a new normalizer that has loaded the state of the old one, as after a restart of the process.

        The new normalizer has empty caches, and does not know which tail blocks the engine holds.
        """
        before = self.normalizer
        self.normalizer = Normalizer(before.spec, self.stats, before.index)
        self.normalizer.load(before.dump())

    def announced(self) -> PlainSetRouter:
        """Return a router that has applied only the events with which the normalizer announces its index."""
        router = PlainSetRouter()
        router.apply(0, payload(*self.normalizer.announce()))
        return router

    @property
    def rejected(self) -> dict[str, int]:
        return dict(self.stats.rejected)

    @property
    def filtered(self) -> dict[str, int]:
        return dict(self.stats.filtered)

    @property
    def live(self) -> set[Any]:
        """The hashes of all blocks that the router holds, on any medium and in any group."""
        return {block for _, _, block in self.router.blocks}


# -- what happens ------------------------------------------------------------------------------------------------------


class Happens:
    """A step of a script that gives the relay an event. The event is built when the script reaches the step."""

    def __init__(self, text: str, make: Callable[[Conversation], RelayEvent], *, after: float = 0.0) -> None:
        self.text = text
        self.make = make
        self.after = after


def up(source: int = 0) -> Happens:
    return Happens(f"up {source}", lambda _: SourceUp(source))


def down(source: int = 0) -> Happens:
    return Happens(f"down {source}", lambda _: SourceDown(source))


def live(seq: int, *events: Any, source: int = 0, ts: float = 1.0, rank: int | None = 0, topic: bytes = b"") -> Happens:
    def make(script: Conversation) -> RelayEvent:
        return BatchReceived(source, script.frames(seq, *events, ts=ts, rank=rank, topic=topic))

    return Happens(f"live {seq}: {'; '.join(map(short, events))}", make)


def raw(*frames: bytes, source: int = 0) -> Happens:
    return Happens(f"live frames {frames}", lambda _: BatchReceived(source, list(frames)))


def replayed(seq: int, *events: Any, source: int = 0, request: int | None = None) -> Happens:
    """Return the step in which one batch of a replay answer arrives.

    If ``request`` is None, the batch belongs to the answer to the newest request.
    """

    def make(script: Conversation) -> RelayEvent:
        number = script.requests[source] if request is None else request
        return ReplayReceived(source, number, [b"", *script.frames(seq, *events)[1:]])

    return Happens(f"replayed {seq}: {'; '.join(map(short, events))}", make)


def replay_end(source: int = 0, request: int | None = None) -> Happens:
    """Return the step in which END of a replay answer arrives.

    If ``request`` is None, it ends the answer to the newest request.
    """

    def make(script: Conversation) -> RelayEvent:
        number = script.requests[source] if request is None else request
        return ReplayReceived(source, number, [b"", END_SEQ, b""])

    return Happens("replay ends", make)


def replay_aborted(source: int = 0, request: int | None = None) -> Happens:
    """Return the step in which a replay answer breaks off at a frame that is too large.

    If ``request`` is None, it is the answer to the newest request.
    """

    def make(script: Conversation) -> RelayEvent:
        return ReplayAborted(source, script.requests[source] if request is None else request)

    return Happens("replay breaks off", make)


def snapshot(seq: int, *chunks: bytes, source: int = 0, request: int | None = None) -> Happens:
    """Return the step in which the reply to a snapshot request arrives.

    If ``request`` is None, it is the reply to the newest request.
    """

    def make(script: Conversation) -> RelayEvent:
        number = script.requests[source] if request is None else request
        return SnapshotReceived(source, number, [seq.to_bytes(8, "big", signed=True), bytes(16), *chunks])

    return Happens(f"snapshot as of {seq}", make)


def tick(seconds: float = 0.0, wall: float = 0.0, stood: float = 0.0) -> Happens:
    return Happens(f"{seconds} s later, {stood} s of which are left out", lambda _: Tick(wall, stood), after=seconds)


def unread(source: int = 0, *, answer: bool = False) -> Happens:
    """Return the step in which unread messages wait on the live stream.

    With ``answer``, they wait in the answer to the newest request.
    """
    what = "the answer" if answer else "the live stream"
    return Happens(f"{what} waits", lambda script: Unread(source, script.requests[source] if answer else None))


def asked(start: int, output: int = 0, stream: int = 0) -> Happens:
    frames = [b"router", b"", start.to_bytes(8, "big")]
    return Happens(f"router asks from {start}", lambda _: ReplayAsked(output, stream, frames))


def asked_raw(*frames: bytes, output: int = 0, stream: int = 0) -> Happens:
    return Happens(f"router sends {frames}", lambda _: ReplayAsked(output, stream, list(frames)))


# -- what is done about it -----------------------------------------------------------------------------------------------


class Answering(NamedTuple):
    """The relay's command that starts a replay answer, and a reader of this answer."""

    command: AnswerReplay
    reader: AnswerReader


Done = Command | Action | Answering


class Does:
    """An expected command of the relay, or action of a sequencer.

    It equals a command or action that meets the expectation.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: str, differs: Callable[[Done], bool]) -> None:
        self.text = text
        self.differs = differs

    def __eq__(self, other: object) -> bool:
        return not self.differs(other)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return self.text


def publish(seq: int, *events: Any, output: int = 0, stream: int = 0, **envelope: Any) -> Does:
    """Expect a batch of exactly these events. Compare ``ts``, ``rank`` and ``topic`` only if they are given."""
    expected = [{k: v for k, v in event.items() if v is not None} for event in events]

    def differs(command: Done) -> bool:
        if not isinstance(command, Publish):
            return True
        ts, got, rank = unpack(command.payload)
        facts = {"ts": ts, "rank": rank, "topic": command.topic}
        return (
            (command.output, command.stream, command.seq, command.events) != (output, stream, seq, len(expected))
            or plain_all(got) != expected
            or any(facts[name] != value for name, value in envelope.items())
        )

    return Does(f"publish {seq}: {'; '.join(map(short, events))} {envelope or ''}", differs)


def ask(start: int, source: int = 0) -> Does:
    return Does(
        f"ask source {source} from {start}",
        lambda command: (
            command.start != start
            if isinstance(command, Ask)
            else not isinstance(command, RequestReplay) or (command.source, command.start) != (source, start)
        ),
    )


def ask_snapshot(source: int = 0) -> Does:
    return Does(
        f"ask source {source} for a snapshot",
        lambda command: (
            not (
                isinstance(command, AskSnapshot) or (isinstance(command, RequestSnapshot) and command.source == source)
            )
        ),
    )


def cancel(source: int = 0) -> Does:
    return Does(
        f"cancel at source {source}",
        lambda command: (
            not (isinstance(command, Stop) or (isinstance(command, CancelReplay) and command.source == source))
        ),
    )


def answer(*seqs: int, output: int = 0, stream: int = 0) -> Does:
    """Expect a replay answer of exactly these batches and one END."""

    def differs(read: Done) -> bool:
        if not isinstance(read, Answering) or (read.command.output, read.command.stream) != (output, stream):
            return True
        return seqs_of(read.reader) != [*seqs, "END"]

    return Does(f"answer {seqs}", differs)


def seqs_of(reply: Any) -> list[int | str]:
    """Return the seqs of a complete answer, with ``END`` for the END marker."""
    found: list[int | str] = []
    while (message := reply.next_message()) is not None:
        if message:
            found.append("END" if message[-2] == END_SEQ else int.from_bytes(message[-2], "big"))
    return found


def _say(command: Done) -> str:
    if isinstance(command, Publish):
        _, events, rank = unpack(command.payload)
        said = "; ".join(short(event) if isinstance(event, dict) else repr(event) for event in events)
        return f"publish {command.seq} on {command.output}/{command.stream}, rank {rank}: {said}"
    if isinstance(command, RequestReplay):
        return f"ask source {command.source} from {command.start} (request {command.request})"
    if isinstance(command, CancelReplay):
        return f"cancel at source {command.source} (request {command.request})"
    return "answer a replay request" if isinstance(command, AnswerReplay | Answering) else str(command)


# -- the conversation --------------------------------------------------------------------------------------------------


class Conversation:
    """The events that a test gives to a relay or a sequencer, and the commands or actions that follow from them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.requests: dict[int, int] = {}
        """The id of the newest replay request of each source."""
        self._pending: list[Any] = []
        self._lines: list[str] = []

    def handle(self, event: RelayEvent) -> list[Any]:
        """Return the relay's commands, or the sequencer's actions, that follow from an event."""
        raise NotImplementedError

    def frames(self, seq: int, *events: Any, **envelope: Any) -> list[bytes]:
        """Return the frames of a batch as the publisher sends it."""
        return batch(seq, *events, **envelope)

    def __rshift__(self, happens: Happens) -> Self:
        self._nothing_left()
        self.now += happens.after
        self._lines.append(f">> {happens.text}")
        self._pending = self.handle(happens.make(self))
        return self

    def __lshift__(self, does: Does | list[Does]) -> Self:
        for each in does if isinstance(does, list) else [does]:
            if not self._pending:
                self._fail(each.text, "nothing")
            if each.differs(self.readable(self._pending[0])):
                self._fail(each.text, _say(self._pending[0]))
            self._pending.pop(0)
            self._lines.append(f"<< {each.text}")
        return self

    def readable(self, done: Done) -> Done:
        """Return a command unchanged.

        A command that starts a replay answer is returned together with a reader of the answer.
        """
        return done

    def __bool__(self) -> bool:
        self._nothing_left()
        return True

    def after(self, *happens: Happens) -> list[Any]:
        """Return all commands that follow from these events."""
        return [command for each in happens for command in (self >> each).whatever()]

    def whatever(self) -> list[Any]:
        """Return the commands of the last event that the script has not named yet. The script need not name them."""
        commands, self._pending = self._pending, []
        self._lines += [f"<< (not looked at) {_say(command)}" for command in commands]
        return commands

    def _nothing_left(self) -> None:
        if self._pending:
            self._fail("nothing", "\n           ".join(map(_say, self._pending)))

    def _fail(self, expected: str, got: str) -> None:
        said = "\n  ".join(self._lines)
        raise AssertionError(f"the conversation so far:\n  {said}\n  expected {expected}\n  but got  {got}")


class Script(Conversation):
    """A conversation with a relay that by default has one source and one output.

    Keywords that the constructor does not name are fields of the SourceSpec.
    """

    def __init__(
        self,
        *,
        replay: bool = False,
        heartbeat: float = 0.0,
        ranks: tuple[int, ...] = (0,),
        profiles: tuple[str, ...] = ("vllm",),
        topic: bytes | None = None,
        merged: bool = False,
        journal_batches: int = 10_000,
        rights: Rights = EVERYTHING,
        **spec: Any,
    ) -> None:
        spec = {"replay": replay, "probe_interval": 0.0, **spec}
        self.relay = Relay(
            [SourceSpec(f"engine/{rank}", rank, **spec) for rank in ranks],
            [
                OutputSpec(
                    f"out-{at}",
                    PROFILES[name],
                    [topic] if merged else [topic] * len(ranks),
                    merged=merged,
                    heartbeat=heartbeat,
                    journal_batches=journal_batches,
                    rights=rights,
                )
                for at, name in enumerate(profiles)
            ],
        )
        super().__init__()
        self.router = PlainSetRouter()
        """A router that gets every batch of stream 0 of output 0."""

    @property
    def source(self) -> Any:
        return self.relay.sources[0]

    @property
    def stats(self) -> SourceStats:
        return self.relay.sources[0].stats

    def readable(self, done: Done) -> Done:
        return Answering(done, reading(self.relay, done)) if isinstance(done, AnswerReplay) else done

    def handle(self, event: RelayEvent) -> list[Any]:
        commands = self.relay.handle(event, self.now)
        for command in commands:
            if isinstance(command, RequestReplay | RequestSnapshot):
                self.requests[command.source] = command.request
            elif isinstance(command, Publish) and (command.output, command.stream) == (0, 0):
                self.router.apply(command.seq, command.payload)
        for source in self.relay.sources:
            all_accounted_for(source)
        return commands
