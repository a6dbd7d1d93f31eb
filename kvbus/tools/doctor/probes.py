"""Probes of one publisher: doctor reads its live stream as a SUB socket, and requests a replay as a DEALER socket.

The relay's own code processes the live messages. So doctor accepts and rejects the same messages as a running kvbus.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from msgspec import UNSET, structs

from kvbus.common.errors import BindError
from kvbus.config import Config, SourceStream
from kvbus.core.events import BatchReceived, SourcesNamed, StreamBroken
from kvbus.core.relay import Relay
from kvbus.core.sequencing.fingerprints import fingerprint
from kvbus.core.source import Source
from kvbus.core.source_spec import SourceLocation, SourceSpec
from kvbus.core.types import Hash, Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.encoding import value
from kvbus.core.wire.frames import (
    ASKS_REPLAY,
    FrameLimits,
    LiveMessage,
    ReplayEnd,
    parse_live,
    parse_replay,
    replay_request,
)
from kvbus.core.wire.schema import BlockStored
from kvbus.core.wire.tokens import decode_tokens
from kvbus.daemon.build import source_spec
from kvbus.transport.curve import Curve
from kvbus.transport.dialling import ClosedError, Connection, Dialled, accept, dial
from kvbus.transport.reach import PUBLISHERS, Outcome, Stop
from kvbus.transport.subscription import BROKEN, limits_of_publishers
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.reasons import ProtocolError

MAX_KEPT: Final = 1024
"""Maximum number of batches that doctor remembers of one publisher.

It is also the maximum number of topics, and of first blocks of prompts.
"""

Root = bytes
"""Digest of everything on which the hash of a prompt's first block depends: tokens, LoRA, salt and other keys."""


class Heard:
    """A summary of the messages that doctor has received from one publisher.

    Args:
        spec: the specification of the source, as the daemon would use it. The summary does not use the source's replay
            and snapshot endpoints.
        limits: limits on the frames, bytes and events of a message.
        location: position of the source in the configuration.
    """

    def __init__(self, spec: SourceSpec, limits: FrameLimits, location: SourceLocation) -> None:
        self._relay = Relay([structs.replace(spec, replay=False, snapshot=False)], [], limits)
        self._relay.handle(SourcesNamed({0: location}), 0.0)
        self._limits = limits
        self.topics: Counter[bytes] = Counter()
        self.batches: dict[int, int] = {}
        """Fingerprints of the newest batches, by seq."""
        self.contested = 0
        """Number of batches that have the seq of an earlier batch but another payload.

        Several of them show that two publishers use one endpoint.
        """
        self.events = 0
        self.stores = 0
        self.ranks: set[int] = set()
        self.kinds: set[str] = set()
        """Types of the block hashes: ``bytes``, ``integer`` or both."""
        self.roots: dict[Root, Hash] = {}
        self.skew: float | None = None
        """Seconds by which the publisher's clock is behind this machine's clock; negative if it is ahead.

        Each batch shows the difference between the clocks plus the time that the batch took. The difference closest to
        0 is kept, because it contains the least delay.
        """
        self.messages = 0

    @property
    def source(self) -> Source:
        """The source in the relay that processes the publisher's messages."""
        return self._relay.sources[0]

    @property
    def newest(self) -> int | None:
        """Seq of the newest batch; None before the first batch."""
        return next(reversed(self.batches), None)

    @property
    def wanted(self) -> int:
        """Number of messages whose topic begins with the configured topic."""
        topic = self.source.spec.topic
        return sum(count for each, count in self.topics.items() if each.startswith(topic))

    def take(self, frames: list[bytes], *, live: bool) -> None:
        """Add one message to the summary. ``live`` says whether it came live.

        A message of a replay has the three frames of a live message: topic, seq and payload.
        """
        self.messages += 1
        topic = frames[0] if frames else b""
        if live:
            if topic in self.topics or len(self.topics) < MAX_KEPT:
                self.topics[topic] += 1
            if not topic.startswith(self.source.spec.topic):
                return
        message = parse_live(frames, self._limits)
        if not isinstance(message, Reason):
            if live and self.source.topics.own in {None, topic}:  # batches of other topics may have another numbering
                self._number(message)
            self._look_into(message, live=live)
        if live:
            self._relay.handle(BatchReceived(0, frames), time.monotonic())

    def closed(self, reason: Reason) -> None:
        """Add to the summary that the publisher broke a limit or a rule of ZMTP, which ended the connection."""
        self._relay.handle(StreamBroken(0, reason), time.monotonic())

    def _number(self, message: LiveMessage) -> None:
        before, now = self.batches.pop(message.seq, None), fingerprint(message.payload)
        self.contested += before is not None and before != now
        self.batches[message.seq] = now
        if len(self.batches) > MAX_KEPT:
            del self.batches[next(iter(self.batches))]

    def _look_into(self, message: LiveMessage, *, live: bool) -> None:
        batch = decode_batch(message.payload)
        if isinstance(batch, Reason):
            return
        if batch.rank is not None:
            self.ranks.add(batch.rank)
        if live and batch.ts:
            behind = time.time() - batch.ts
            self.skew = behind if self.skew is None else min(self.skew, behind, key=abs)
        self.events += len(batch.events)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.stores += 1
                self.kinds.update("bytes" if isinstance(each, bytes) else "integer" for each in event.block_hashes)
                self._remember_root(event)
        self.source.dialect.see(message.payload)

    def _remember_root(self, event: BlockStored) -> None:
        tokens = decode_tokens(event.token_ids)
        if value(event, "parent_block_hash") is not None or isinstance(tokens, Reason) or len(self.roots) >= MAX_KEPT:
            return
        carried = [b"" if each is UNSET else bytes(each) for each in (event.extra_keys, event.cache_salt)]  # type: ignore[comparison-overlap]
        about = (event.block_size, *(value(event, name) for name in ("lora_id", "lora_name", "group_idx")), *carried)
        root = repr((about, tokens[: event.block_size])).encode()
        self.roots[blake2b(root, digest_size=16).digest()] = event.block_hashes[0]


def differing_roots(heard: Sequence[tuple[str, Heard]]) -> Iterator[tuple[str, str]]:
    """Yield the labels of two publishers that give different hashes to the same first block of a prompt.

    If there are no two such publishers, yield nothing.

    The hash of a first block depends on the block's tokens and on a seed. vLLM draws a random seed in each process
    unless ``PYTHONHASHSEED`` is set. If the seeds differ, a router cannot find the block at both publishers by one
    hash.
    """
    first: dict[Root, tuple[str, Hash]] = {}
    for label, each in heard:
        for root, name in each.roots.items():
            other, known = first.setdefault(root, (label, name))
            if known != name and type(known) is type(name) and other != label:
                yield other, label
                return


NEWEST: Final = 2**63 - 1
"""A seq that is higher than any real seq. The answer to a replay request from this seq is only END."""
REACH: Final = 16
"""doctor's replay request begins this number of batches before the newest batch."""
ENOUGH_S: Final = 1.0
"""Seconds for which doctor continues to listen after the first BlockStored event."""
LISTENING: Final = 0.6
"""Fraction of the timeout for which doctor listens to the live stream. The remaining time is for the replay."""


@dataclass(slots=True)
class Answer:
    """The messages that answer one replay request.

    Attributes:
        start: first requested seq.
        batches: fingerprints of the batches, by seq.
        ended: whether END has come.
        malformed: number of messages that cannot be parsed.
    """

    start: int
    batches: dict[int, int] = field(default_factory=dict)
    ended: bool = False
    malformed: int = 0

    @property
    def first(self) -> int | None:
        """Seq of the oldest batch in the answer; None if the answer has no batch."""
        return min(self.batches, default=None)


@dataclass(slots=True)
class Looked:
    """The results of probing one publisher.

    Attributes:
        stream: the publisher as configured.
        heard: summary of the publisher's messages.
        live: result of connecting to the live stream. None if the publisher itself connects to kvbus and no process
            listens on the port.
        replay: result of connecting to the replay endpoint; None without a replay endpoint.
        answer: the replay answer; None if no replay was requested.
        snapshot: result of connecting to the snapshot endpoint; None without a snapshot endpoint.
        dialled_in: a result for each program that connected to the port while doctor listened on it.
        taken: why doctor could not bind the port to which the publisher connects. ``bus`` means that a running bus has
            the port. Empty if doctor could bind it, or did not try.
    """

    stream: SourceStream
    heard: Heard
    live: Outcome | None = None
    replay: Outcome | None = None
    answer: Answer | None = None
    snapshot: Outcome | None = None
    dialled_in: list[Outcome] = field(default_factory=list)
    taken: str = ""


class Prober:
    """A prober of publishers. It probes the live stream, the replay endpoint and the snapshot endpoint of a publisher.

    Args:
        config: the configuration that lists the publishers.
        curve: CURVE keys, by position in ``sources``.
        timeout: maximum seconds for all probes of one publisher.
        history: whether to request the replay from seq 0.
        may_bind: whether doctor may bind a port to which an engine connects. It may if no bus runs.
    """

    def __init__(
        self, config: Config, curve: dict[int, Curve], *, timeout: float, history: bool = False, may_bind: bool = False
    ) -> None:
        self._config = config
        self._curve = curve
        self._timeout = timeout
        self._history = history
        self._may_bind = may_bind
        limits = config.limits
        self._frames = FrameLimits(limits.max_frames, limits.max_frame_bytes, limits.max_events)
        self._limits = limits_of_publishers(limits.max_frame_bytes)

    async def look(self, stream: SourceStream) -> Looked:
        """Probe the endpoints of one publisher in parallel, and return the results."""
        location = SourceLocation(f"sources[{stream.source_index}]", stream.endpoint)
        looked = Looked(stream, Heard(source_spec(self._config, stream), self._frames, location))
        end = asyncio.get_running_loop().time() + self._timeout
        heard = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._live(looked, heard))
            if stream.replay_endpoint is not None:
                tasks.create_task(self._replay(looked, stream.replay_endpoint, heard, end))
            if stream.snapshot_endpoint is not None:
                tasks.create_task(self._snapshot(looked, stream.snapshot_endpoint))
        return looked

    def _dial(self, looked: Looked, endpoint: str, role: Role) -> contextlib.AbstractAsyncContextManager[Dialled]:
        curve = self._curve.get(looked.stream.source_index)
        return dial(endpoint, role, seconds=self._timeout, curve=curve, limits=self._limits)

    async def _live(self, looked: Looked, done: asyncio.Event) -> None:
        stream = looked.stream
        try:
            if stream.bind:
                async with asyncio.timeout(self._timeout * LISTENING) as limit:
                    await self._dialled_in(looked, limit)
                return
            async with self._dial(looked, stream.endpoint, Role.SUB) as dialled:
                looked.live = dialled.outcome
                if dialled.connection is not None and dialled.outcome.socket_type in PUBLISHERS:
                    async with asyncio.timeout(self._timeout * LISTENING) as limit:
                        await _listen(dialled.connection, looked.heard, limit)
        except TimeoutError:
            return  # not an error, because doctor listens only until this timeout
        finally:
            done.set()

    async def _dialled_in(self, looked: Looked, limit: asyncio.Timeout) -> None:
        endpoint = looked.stream.endpoint
        if looked.stream.interposed and not self._may_bind:
            looked.taken = "bus"  # a running bus has the port, and would serve doctor there as a router
            return
        here = local(endpoint)
        async with dial(here, Role.SUB, seconds=1.0) as dialled:
            if dialled.outcome.stop is not Stop.REFUSED:
                looked.live = dialled.outcome
                return
        if not self._may_bind:
            looked.taken = "bus"
            return
        curve = self._curve.get(looked.stream.source_index)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for accepted in accept(endpoint, Role.SUB, curve, self._limits):
                    looked.dialled_in.append(accepted.outcome)
                    if accepted.connection is not None and accepted.outcome.socket_type in PUBLISHERS:
                        tasks.create_task(_listen(accepted.connection, looked.heard, limit))
        except BindError as error:
            looked.taken = error.reason

    async def _replay(self, looked: Looked, endpoint: str, heard: asyncio.Event, end: float) -> None:
        async with self._dial(looked, endpoint, Role.DEALER) as dialled:
            looked.replay = dialled.outcome
            if dialled.connection is None or dialled.outcome.socket_type != "ROUTER":
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout * LISTENING):
                    await heard.wait()
            newest = looked.heard.newest
            start = NEWEST if newest is None else max(newest - REACH, 0)
            looked.answer = answer = Answer(0 if self._history else start)
            with contextlib.suppress(TimeoutError, ClosedError, ProtocolError):
                async with asyncio.timeout_at(end):
                    await dialled.connection.send(*replay_request(answer.start))
                    await self._read(dialled.connection, answer, looked.heard)

    async def _read(self, connection: Connection, answer: Answer, heard: Heard) -> None:
        while not answer.ended:
            message = parse_replay(await connection.receive(), self._frames)
            if isinstance(message, ReplayEnd):
                answer.ended = True
            elif isinstance(message, Reason):
                answer.malformed += 1
            else:
                answer.batches[message.seq] = fingerprint(message.payload)
                heard.take([heard.source.spec.topic, message.seq.to_bytes(8, "big"), message.payload], live=False)

    async def _snapshot(self, looked: Looked, endpoint: str) -> None:
        async with self._dial(looked, endpoint, Role.DEALER) as dialled:
            looked.snapshot = dialled.outcome


async def _listen(connection: Connection, heard: Heard, limit: asyncio.Timeout) -> None:
    """Read live messages into ``heard`` until the timeout ``limit`` expires.

    After the first BlockStored event, the timeout is shortened to `ENOUGH_S` seconds.
    """
    loop = asyncio.get_running_loop()
    try:
        # The first subscription announces that doctor requests replays. Then a publisher that is itself a kvbus sends
        # doctor no state. The second subscription is to all topics: if batches come whose topic is not the configured
        # one, the configured topic is wrong.
        await connection.send(b"\x01" + ASKS_REPLAY)
        await connection.send(b"\x01")
        enough = False
        while True:
            heard.take(await connection.receive(), live=True)
            if not enough and heard.stores:
                enough = True
                when = limit.when()
                limit.reschedule(min(loop.time() + ENOUGH_S, loop.time() + ENOUGH_S if when is None else when))
    except ProtocolError as error:
        heard.closed(BROKEN[error.reason])
    except ClosedError:
        return


def local(endpoint: str) -> str:
    """Return an endpoint to which this machine can connect, for an endpoint that kvbus binds.

    Loopback replaces a wildcard.
    """
    for wildcard in ("*", "0.0.0.0", "[::]"):  # noqa: S104 - recognised, not bound
        endpoint = endpoint.replace(f"tcp://{wildcard}:", "tcp://127.0.0.1:")
    return endpoint
