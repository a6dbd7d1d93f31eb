"""Append one stream to a log: first the stream's state, then its batches.

A router can request a state from kvbus. But a reader of a log knows the engine's blocks only from the stream's records.
So a stream in a log begins with the state. kvbus appends the state again after batches were dropped, and when the
configured time has passed. Batches are dropped if the queue is full or if the log is unreachable. The queue is bounded,
and no engine waits for the log.

kvbus divides large batches into several records. If the log refuses a record nevertheless, for example because it is
too large, the effect is that of an unreachable log: the waiting batches are dropped, and the state is appended again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvbus.common.tasks import report_out_of_memory
from kvbus.config import OutputConfig
from kvbus.core.commands import Publish
from kvbus.core.events import Subscribed
from kvbus.core.log_relay import LAST
from kvbus.core.outputs.stream import Transfer
from kvbus.parts.log.contract import START, FencedError, Log, Pointer, UnavailableError, Writer
from kvbus.parts.log.follower import LEASE, LEASE_TTL, SILENCE
from kvbus.parts.log.record import SCHEMA, Kind, Record, Stream, block_size_of, divided, write
from kvbus.parts.outputs.contract import Services

OVERDUE: Final = 10.0
"""Number of seconds by which a state in a log may be late before the metric ``states_overdue`` counts its stream.

A state is the live blocks of the stream, which kvbus appends to the log again and again.
"""

LEAST_TAIL: Final = 4 * 1024 * 1024
"""When the batches since a stream's newest state have this many bytes together, kvbus appends a new state to the log.

A state has the live blocks of the stream. If the newest state is larger than this number, the batches must have as many
bytes as that state.
"""


class StateDue:
    """The rules that decide when the state of one stream has to be appended to the log again.

    A writer epoch is the time in which this kvbus is the writer of the stream in the log.

    Args:
        every: maximum number of seconds between two states.
        now: the time at which the stream was opened.

    Attributes:
        position: the position of the newest state of this writer epoch; None if the epoch has no state yet.
        trimmed: whether the log's retention has deleted that state.
    """

    def __init__(self, every: float, now: float) -> None:
        self._every = every
        self._written_at = now
        """The time at which the newest state was appended, even if that was in an earlier writer epoch.

        Before the first state, it is the time at which the stream was opened.
        """
        self._tail_bytes = self._state_bytes = 0
        self._state_at = self._look_at = 0.0
        self._pause = LEASE
        self.position: int | None = None
        self.trimmed = False

    def begin(self, now: float) -> None:
        """Start a writer epoch, which has no state yet.

        The appender requests the first state of an epoch without asking :meth:`due`. So the next state is due only
        after ``every`` seconds.
        """
        self._state_at = now
        self.position, self.trimmed = None, False

    def wrote_batches(self, size: int) -> None:
        """Add ``size`` to the number of bytes that were appended after the newest state."""
        self._tail_bytes += size

    def wrote_state(self, size: int, position: int, now: float) -> None:
        """Record that a state of ``size`` bytes was appended at ``position``, even if :meth:`due` was False."""
        self._tail_bytes, self._state_bytes, self.position = 0, size, position
        self._state_at = self._written_at = now
        self._pause = min(2 * self._pause, max(LEASE, self._every)) if self.trimmed else self._pause
        self._look_at = now + self._pause
        self.trimmed = False

    def due(self, now: float) -> bool:
        """Return whether a new state is due.

        It is due if enough bytes follow the newest state, if that state is too old, or if the log has deleted it.
        """
        paid = self._tail_bytes >= max(self._state_bytes, LEAST_TAIL)
        return paid or self.trimmed or now - self._state_at >= self._every

    def overdue(self, now: float) -> bool:
        """Return whether the newest state is overdue: older than the time between two states plus :data:`OVERDUE`."""
        return now - self._written_at > self._every + OVERDUE

    def looks(self, now: float) -> bool:
        """Return whether the caller has to check now that the log still has the newest state."""
        return self.position is not None and not self.trimmed and now >= self._look_at

    def looked(self, now: float, *, kept: bool) -> None:
        """Note the result of a check of the log. ``kept`` says whether the log still has the newest state."""
        self.trimmed = not kept
        if kept:
            self._pause = LEASE
            self._look_at = now + LEASE


log = logging.getLogger("kvbus.daemon")

MOST_RECORDS: Final = 256
MOST_BYTES: Final = 512 * 1024
"""Maximum size in bytes of the records in one append. If a single record is larger, it is appended alone.

:data:`MOST_RECORDS` is the maximum number of records in one append.
"""

PAUSE: Final = 0.2
MOST_PAUSE: Final = 5.0
"""Maximum pause in seconds before kvbus tries to reach the log again.

The first pause is :data:`PAUSE` seconds, and each further pause is twice as long as the one before.
"""

ASK_AGAIN: Final = 1.0
"""Number of seconds after which kvbus requests a stream's state from the relay again if the relay has not given it."""

FAREWELL: Final = 5.0
"""Timeout in seconds of appending the end of a stream."""

READER: Final = 1
"""The router id with which an appender requests a stream's state from the relay.

The relay treats the log as a router.
"""

QUEUE_FULL: Final = "queue_full"
UNAVAILABLE: Final = "log_unavailable"
FENCED: Final = "fenced"
CLOSED: Final = "closed"
"""The reason that is counted for batches that were dropped because their stream was closed before they were appended.

The other reasons are :data:`QUEUE_FULL`, :data:`UNAVAILABLE` and :data:`FENCED`.
"""


@dataclass(frozen=True)
class _State:
    """A state (the live blocks of the stream) that waits in the queue, between the batches before it and after it."""

    transfer: Transfer
    reason: str


class _StreamEnd:
    """An item in the queue that stands for the end of the stream. All batches of the stream are before it."""


class Appender:
    """The writer of one stream to a log, from the stream's first state to its end.

    Args:
        target: the log.
        stream: the names of the stream in the log.
        config: the output's configuration.
        services: the daemon's counters, functions and limits for this driver.
        subscription: the event with which the appender requests the stream's state from the relay. The relay answers
            with a call of :meth:`state`. It does not answer while it cannot give the state.
        state_every: seconds after which the state is appended again.
    """

    def __init__(
        self,
        target: Log,
        stream: Stream,
        config: OutputConfig,
        services: Services,
        subscription: Subscribed,
        state_every: float,
    ) -> None:
        self._log = target
        self._stream = stream
        self._config = config
        self._stats = stats = services.stats
        self._feed = services.feed
        self._subscription = subscription
        self._due = StateDue(state_every, asyncio.get_running_loop().time())
        self._others_pause = state_every + OVERDUE + LEASE_TTL
        """Maximum number of seconds after which another writer of this stream, if it is running, replaces the pointer.

        A writer replaces the stream's pointer with each state that it appends.
        """
        self._fresh: deque[Publish | _State | _StreamEnd] = deque()
        """Batches, states and the end of the stream that were queued since the last :meth:`flush`."""
        self._queue: deque[Publish | _State | _StreamEnd] = deque()
        self._in_flight: list[Publish] = []
        self._wake = asyncio.Event()
        self._shown = True
        """Whether the gauges of the output include this stream's queue. They do until the stream is closed."""
        self._missing = "subscribed" if config.on_subscribe == "state" else ""
        """Why the stream's state has to be appended before any further batch; empty if a batch may be next."""
        self._reason = ""
        """The reason that is counted for batches that are dropped until the stream's state is queued again.

        It is empty before the first loss, because batches before the first state are dropped without being counted.
        """
        self._asked = False
        self._coming = False
        """Whether a state waits in the queue, so that no other state has to be requested."""
        self._ask_at = 0.0
        self._seq = 0
        self._block_size = 0
        self._appended_at: float | None = None
        """The time at which the newest record of this writer epoch was appended; None before the first record."""
        self._overdue = self._fenced = False
        stats.queue_limit += config.queue_batches
        self._task = asyncio.get_running_loop().create_task(self._run())

    # -- incoming ------------------------------------------------------------------------------------------------------

    def publish(self, command: Publish) -> None:
        """Queue one batch for the log.

        Drop it if the queue is full, or if the stream's state has to be appended first. An empty batch is ignored,
        because it changes nothing, and a log does not need it.
        """
        if not command.events:
            return
        if self._missing:
            if self._reason:
                self._drop(self._reason, command)
            return
        if len(self._fresh) + len(self._queue) + len(self._in_flight) >= self._config.queue_batches:
            self._drop(QUEUE_FULL, command)
            if self._config.on_subscribe == "state":
                self._missing, self._reason = "lost", QUEUE_FULL
                self._wake.set()
            return
        self._fresh.append(command)
        self._stats.queue_depth += 1

    def state(self, transfer: Transfer) -> None:
        """Queue the state that the appender has requested from the relay.

        Batches that are published later come after it.
        """
        if self._asked:
            self._fresh.append(_State(transfer, self._missing))
            self._asked, self._coming = False, True
            self._missing = ""

    @property
    def fresh(self) -> bool:
        """Whether items were queued since the last :meth:`flush`."""
        return bool(self._fresh)

    def flush(self) -> None:
        """Pass the items that were queued since the last flush to the task that writes the log."""
        self._queue.extend(self._fresh)
        self._fresh.clear()
        self._wake.set()

    @property
    def busy(self) -> int:
        """Number of batches, states and other items that are not in the log yet.

        After the stream was closed, the number is 1 until the writing task has ended, and then 0.
        """
        waiting = len(self._fresh) + len(self._queue) + len(self._in_flight)
        return waiting if self._shown else int(not self._task.done())

    def close(self, linger: float) -> None:
        """Stop writing the stream. Before that, append the queued items for up to ``linger`` seconds."""
        self.flush()
        waits = not self._fenced and not self._task.done()
        self._hide()
        if linger > 0 and self._queue and waits:
            asyncio.get_running_loop().call_later(linger, self._end)
        else:
            self._end()

    def retire(self) -> None:
        """Append the queued items and the end of the stream, and then stop writing the stream for good."""
        self._fresh.append(_StreamEnd())
        self.close(FAREWELL)

    def _hide(self) -> None:
        if self._shown:
            self._shown = False
            self._stats.queue_limit -= self._config.queue_batches
            self._stats.queue_depth -= sum(isinstance(item, Publish) for item in (*self._queue, *self._in_flight))
            self._show_fenced(fenced=False)

    def _show_overdue(self) -> None:
        """Update the gauge ``states_overdue``: the number of streams whose next state is late (:data:`OVERDUE`).

        A stream is counted only if this kvbus is its writer and has to append its states.
        """
        wanted = self._shown and not self._fenced and self._config.on_subscribe == "state"
        before, self._overdue = self._overdue, wanted and self._due.overdue(asyncio.get_running_loop().time())
        self._stats.states_overdue += self._overdue - before

    def _end(self) -> None:
        self._drop_all(CLOSED)
        self._task.cancel()

    def _drop(self, reason: str, command: Publish) -> None:
        self._stats.dropped_batches[reason] += 1
        self._stats.dropped_events[reason] += command.events

    def _drop_all(self, reason: str) -> None:
        """Drop all waiting items. Count their batches as dropped for ``reason``."""
        for item in (*self._in_flight, *self._queue, *self._fresh):
            if isinstance(item, Publish):
                self._drop(reason, item)
                self._stats.queue_depth -= self._shown
        for items in (self._in_flight, self._queue, self._fresh):
            items.clear()
        self._coming = False

    # -- outgoing ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._write()
            except Exception as error:
                report_out_of_memory(error)
                log.exception(
                    "output %s: writing %s has failed because of a defect in kvbus", self._config.name, self._stream.key
                )
                self._lose(UNAVAILABLE)
                await asyncio.sleep(MOST_PAUSE)
            else:
                return

    async def _write(self) -> None:
        """Claim the stream in the log and write it.

        Begin again after a failure, until all items of the stream are in the log.

        Each claim begins a writer epoch. An epoch ends when the log fails or when another writer claims the stream. The
        method returns when the stream is closed.
        """
        pause, before = PAUSE, ""
        while True:
            self._show_overdue()
            try:
                writer = await self._log.claim(self._stream.key)
            except (UnavailableError, FencedError) as error:
                self._count(error)
                if str(error) != before:
                    before = str(error)
                    self._say(logging.WARNING, f"kvbus cannot write %s: {error}; it tries again every {MOST_PAUSE:g} s")
                await asyncio.sleep(pause)
                pause = min(MOST_PAUSE, 2 * pause)
                continue
            self._say(logging.INFO, f"kvbus is the writer of %s, in writer epoch {writer.epoch}")
            before, fenced, refused = "", False, False
            try:
                self._stats.streams_written += 1
                await self._turn(writer)
            except UnavailableError as error:
                self._say(
                    logging.WARNING, f"the log failed for %s: {error}; kvbus writes the state when the log works again"
                )
                self._count(error)
                self._lose(UNAVAILABLE)
                refused = True
            except FencedError:
                self._lose(FENCED)
                fenced = True
            else:
                return
            finally:
                self._stats.streams_written -= 1
                await writer.close()
            if self._appended_at is not None:
                pause = PAUSE
            if fenced:
                await self._until_left(writer.epoch)
            elif refused:  # wait: the log may accept every claim but refuse every record, for example as too large
                await asyncio.sleep(pause)
                pause = min(MOST_PAUSE, 2 * pause)

    def _say(self, level: int, text: str) -> None:
        """Write a line about the stream to kvbus's own log. Any ``%s`` in ``text`` stands for the stream's key."""
        fields = {"output": self._config.name, "stream": self._stream.key}
        log.log(level, "output %s: %s", self._config.name, text.replace("%s", self._stream.key), extra=fields)

    async def _until_left(self, epoch: int) -> None:
        """Wait until no other writer writes the stream. Otherwise the two writers would fence each other forever.

        A writer replaces the stream's pointer with each state. If the pointer stays the same for long enough, the other
        writer is gone. If there is no pointer, no writer has the stream: either the operator has erased the stream, or
        another program has overwritten the pointer.

        A broker also fences a writer whose transaction is open for too long. The pointer still has the epoch of this
        writer in that case, so there is no other writer to wait for.

        ``epoch`` is the epoch in which this writer was fenced.
        """
        now = asyncio.get_running_loop().time
        seen: Pointer | None = Pointer(epoch)
        since = now()
        while True:
            with contextlib.suppress(UnavailableError):
                pointer = (await self._log.pointers(self._stream.key)).get(self._stream.key)
                if pointer is not None and pointer.epoch == epoch:
                    break
                if pointer != seen:
                    seen, since = pointer, now()
                wait = LEASE_TTL if pointer is None else self._others_pause
                if not self._fenced and self._shown:
                    self._show_fenced(fenced=True)
                    until = f"kvbus writes it again after {wait:.0f} s without another writer"
                    self._say(logging.ERROR, f"another writer has claimed %s, or the stream was erased: {until}")
                if now() - since >= wait:
                    break
            await asyncio.sleep(MOST_PAUSE)
        self._show_fenced(fenced=False)

    def _show_fenced(self, *, fenced: bool) -> None:
        self._stats.streams_fenced += fenced - self._fenced
        self._fenced = fenced
        self._show_overdue()

    def _count(self, error: Exception) -> None:
        if isinstance(error, UnavailableError):
            self._stats.refused[error.reason] += 1

    def _lose(self, reason: str) -> None:
        self._drop_all(reason)
        self._asked = False
        if self._config.on_subscribe == "state":
            self._missing, self._reason = "lost", reason

    async def _turn(self, writer: Writer) -> None:
        """Write the queued items in one writer epoch. Return when the stream is closed and all items are in the log."""
        now = asyncio.get_running_loop().time
        self._seq = 0
        self._ask_at = now()
        self._appended_at = None
        self._due.begin(now())
        while True:
            self._wake.clear()
            self._show_overdue()
            if self._shown:
                await self._look(writer)
                self._ask()
            if self._queue:
                item = self._queue[0]
                if isinstance(item, _State):
                    await self._append_state(writer, item)
                elif isinstance(item, _StreamEnd):
                    await self._append(writer, [write(self._record(writer, Kind.GONE))])
                    self._queue.popleft()
                else:
                    await self._append_batches(writer)
                continue
            if not self._shown:
                return
            if self._appended_at is not None and now() - self._appended_at >= LEASE:
                await self._append(writer, [write(self._record(writer, Kind.LEASE))])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN):
                    await self._wake.wait()

    async def _look(self, writer: Writer) -> None:
        """Check from time to time that the log still has the newest state, because new readers begin at this state."""
        now = asyncio.get_running_loop().time
        if not self._due.looks(now()):
            return
        kept = True  # if the log does not answer, assume that it still has the newest state
        try:
            kept = await writer.keeps(self._due.position or START)
        except UnavailableError as error:
            self._count(error)
        self._due.looked(now(), kept=kept)

    def _ask(self) -> None:
        """Request the stream's state from the relay if the log needs one.

        The log needs a state if :class:`StateDue` says so, or if a state has to be appended before any further batch
        and the queue is empty.

        The request is repeated after :data:`ASK_AGAIN` seconds, because the relay cannot give a state while the stream
        has no source.
        """
        now = asyncio.get_running_loop().time()
        due = self._config.on_subscribe == "state" and self._due.due(now) and not self._coming
        if ((self._missing and not self._queue) or due) and now >= self._ask_at:
            self._asked, self._ask_at = True, now + ASK_AGAIN
            self._feed(self._subscription)

    async def _append_batches(self, writer: Writer) -> None:
        """Append the batches at the beginning of the queue together, up to the limits of one append."""
        records: list[bytes] = []
        size = 0
        while self._queue and len(records) < MOST_RECORDS and size < MOST_BYTES:
            item = self._queue[0]
            if not isinstance(item, Publish):
                break
            self._queue.popleft()
            self._in_flight.append(item)
            for payload in divided(item.payload, item.events):
                records.append(write(self._record(writer, Kind.BATCH, payload, item.seq)))
                size += len(records[-1])
        await self._append(writer, records)
        self._due.wrote_batches(size)
        stats = self._stats
        for item in self._in_flight:
            stats.batches += 1
            stats.events += item.events
            stats.bytes += len(item.payload)
            stats.queue_depth -= self._shown
        self._in_flight.clear()

    async def _append_state(self, writer: Writer, item: _State) -> None:
        """Append the stream's state (its live blocks) to the log, and then a pointer to the state's first record."""
        end = item.transfer.end_seq
        begin = self._seq
        position = size = 0
        records: list[bytes] = []
        for batch in item.transfer.batches():
            if batch is None:
                await asyncio.sleep(0)
                continue
            seq, payload = batch
            pieces = divided(payload, 2**31)
            for at, piece in enumerate(pieces):
                kind = Kind.CLEAR if self._seq == begin else Kind.STATE
                more = seq + 1 < end or at + 1 < len(pieces)
                record = self._record(
                    writer, kind, piece, seq, more=more, resync=kind is Kind.CLEAR and bool(item.reason)
                )
                # Encode in a thread, because compressing a large payload takes milliseconds. zlib releases the GIL
                # meanwhile, so the event loop can run.
                records.append(await asyncio.to_thread(write, record))
                size += len(records[-1])
                if kind is Kind.CLEAR:
                    position = await self._append(writer, records)
                    records = []
                elif len(records) == MOST_RECORDS or sum(map(len, records)) >= MOST_BYTES:
                    await self._append(writer, records)
                    records = []
        if records:
            await self._append(writer, records)
        await writer.point(Pointer(writer.epoch, begin, position))
        self._queue.popleft()
        self._coming = any(isinstance(each, _State) for each in self._queue)
        self._stats.states_sent[item.reason or ("trimmed" if self._due.trimmed else "refreshed")] += 1
        self._stats.state_bytes += size
        self._due.wrote_state(size, position, asyncio.get_running_loop().time())

    async def _append(self, writer: Writer, records: list[bytes]) -> int:
        position = await writer.append(records)
        now, before = asyncio.get_running_loop().time(), self._appended_at
        if before is not None and now - before >= SILENCE:
            raise UnavailableError(
                f"no record reached the log for {now - before:.0f} s, so readers may have dropped the stream's blocks"
            )
        self._appended_at = now
        return position

    def _record(
        self,
        writer: Writer,
        kind: Kind,
        payload: bytes = b"",
        origin: int = 0,
        *,
        more: bool = False,
        resync: bool = False,
    ) -> Record:
        """Return the next record of the writer epoch, with the next seq.

        Raises:
            UnavailableError: the epoch has no seq left, so the stream has to be claimed again with another epoch.
        """
        if not self._block_size and payload:
            self._block_size = block_size_of(payload)
        if self._seq >= LAST:
            raise UnavailableError("the epoch has no seq left, so another epoch begins")
        numbers = (writer.epoch, self._seq)
        record = Record(SCHEMA, kind, *numbers, payload, origin, self._block_size, more, resync, packed=False)
        self._seq += 1
        return record
