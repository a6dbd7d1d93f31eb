"""Append one stream to a log. Append its state first, again after batches were dropped, and again when it is due.

A router can ask kvbus for a state, but a broker knows the engine's blocks only from its records. So a stream in a log
begins with the state. The state is appended again when batches were dropped, because the queue was full or the log was
unreachable, and when it is due. The queue is bounded, and no engine waits for the log.

kvbus divides large batches into several records. A record that the log refuses nevertheless, for example because it is
too large, ends the turn like an unreachable log: the waiting batches are dropped, and the state is appended again.
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
from kvbus.core.numbered import LAST
from kvbus.core.outputs.stream import Transfer
from kvbus.parts.log.contract import START, FencedError, Log, Pointer, UnavailableError, Writer
from kvbus.parts.log.follower import LEASE, LEASE_TTL, SILENCE
from kvbus.parts.log.record import SCHEMA, Kind, Record, Stream, block_size_of, divided, write
from kvbus.parts.outputs.contract import Services

OVERDUE: Final = 10.0
"""Seconds that a state may be late before it counts as overdue."""

LEAST_TAIL: Final = 4 * 1024 * 1024
"""Minimum bytes of records after a state before the state is written again because of them."""


class StateDue:
    """A timer that shows when one stream's state is due in the log.

    Args:
        every: seconds after which the state is due.
        now: when the stream was opened.

    Attributes:
        position: the position of the newest state of this writer epoch; None if the epoch has no state yet.
        trimmed: whether the log no longer has that state.
    """

    def __init__(self, every: float, now: float) -> None:
        self._every = every
        self._written_at = now
        """When the newest state of any writer epoch was written. Before the first state: when the stream was opened."""
        self._tail_bytes = self._state_bytes = 0
        self._state_at = self._look_at = 0.0
        self._pause = LEASE
        self.position: int | None = None
        self.trimmed = False

    def begin(self, now: float) -> None:
        """Start a writer epoch. Its first state counts as missing, not as due, and the appender requests that state."""
        self._state_at = now
        self.position, self.trimmed = None, False

    def wrote_batches(self, size: int) -> None:
        """Count ``size`` bytes of batch records that were appended."""
        self._tail_bytes += size

    def wrote_state(self, size: int, position: int, now: float) -> None:
        """Note that a state of ``size`` bytes was appended at ``position``, for whatever reason."""
        self._tail_bytes, self._state_bytes, self.position = 0, size, position
        self._state_at = self._written_at = now
        self._pause = min(2 * self._pause, max(LEASE, self._every)) if self.trimmed else self._pause
        self._look_at = now + self._pause
        self.trimmed = False

    def due(self, now: float) -> bool:
        """Return whether the state is due: enough bytes follow it, the log has trimmed it, or it is too old."""
        paid = self._tail_bytes >= max(self._state_bytes, LEAST_TAIL)
        return paid or self.trimmed or now - self._state_at >= self._every

    def overdue(self, now: float) -> bool:
        """Return whether the newest state is older than allowed."""
        return now - self._written_at > self._every + OVERDUE

    def looks(self, now: float) -> bool:
        """Return whether it is time to check that the log still has the newest state."""
        return self.position is not None and not self.trimmed and now >= self._look_at

    def looked(self, now: float, *, kept: bool) -> None:
        """Note whether the log still has the newest state."""
        self.trimmed = not kept
        if kept:
            self._pause = LEASE
            self._look_at = now + LEASE


log = logging.getLogger("kvbus.daemon")

MOST_RECORDS: Final = 256
MOST_BYTES: Final = 512 * 1024
"""Limits of one append, in records and in bytes. A single record may be larger."""

PAUSE: Final = 0.2
MOST_PAUSE: Final = 5.0
"""First and longest pause in seconds before kvbus tries to reach the log again. Each pause doubles the one before."""

ASK_AGAIN: Final = 1.0
"""Seconds before kvbus asks the relay again for a state that the relay could not give."""

FAREWELL: Final = 5.0
"""Timeout for appending the end of a stream, in seconds."""

READER: Final = 1
"""The router's id under which the log asks the relay for states."""

QUEUE_FULL: Final = "queue_full"
UNAVAILABLE: Final = "log_unavailable"
FENCED: Final = "fenced"
CLOSED: Final = "closed"
"""Reasons for dropped batches."""


@dataclass(frozen=True)
class _State:
    """A queued state, at its position among the batches."""

    transfer: Transfer
    reason: str


class _Gone:
    """The queued end of the stream, after all batches."""


class Appender:
    """The writer of one stream, from its first state to its end.

    Args:
        place: the log.
        stream: the stream in the log.
        config: the output's configuration.
        services: the daemon's services.
        asks: the event that asks the relay for the state. The relay answers with a call of :meth:`state`, or not at all
            if it cannot give the state yet.
        state_every: seconds after which the state is appended again.
    """

    def __init__(
        self, place: Log, stream: Stream, config: OutputConfig, services: Services, asks: Subscribed, state_every: float
    ) -> None:
        self._log = place
        self._stream = stream
        self._config = config
        self._stats = stats = services.stats
        self._feed = services.feed
        self._asks = asks
        self._due = StateDue(state_every, asyncio.get_running_loop().time())
        self._others_pause = state_every + OVERDUE + LEASE_TTL
        """Seconds within which another writer of the stream writes a state and its pointer."""
        self._fresh: deque[Publish | _State | _Gone] = deque()
        """Queued items that are not flushed yet."""
        self._queue: deque[Publish | _State | _Gone] = deque()
        self._in_flight: list[Publish] = []
        self._wake = asyncio.Event()
        self._shown = True
        """Whether the stream's queue counts in the gauges."""
        self._missing = "subscribed" if config.on_subscribe == "state" else ""
        """Why a state has to be appended before any batch; empty if a batch may be next."""
        self._reason = ""
        """Reason that counts the batches dropped until the state comes. It is empty before the first loss: batches that
        come before the first state are not counted."""
        self._asked = False
        self._coming = False
        """Whether a state waits in the queue."""
        self._ask_at = 0.0
        self._seq = 0
        self._block_size = 0
        self._appended_at: float | None = None
        """When the newest record of this writer epoch was appended; None before the first record."""
        self._overdue = self._fenced = False
        stats.queue_limit += config.queue_batches
        self._task = asyncio.get_running_loop().create_task(self._run())

    # -- incoming ------------------------------------------------------------------------------------------------------

    def publish(self, command: Publish) -> None:
        """Queue one batch, or drop it if a state has to come first.

        An empty batch is ignored, because a log does not need it.
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
        """Queue the state that was asked for. Batches that are published from now on come after it."""
        if self._asked:
            self._fresh.append(_State(transfer, self._missing))
            self._asked, self._coming = False, True
            self._missing = ""

    @property
    def fresh(self) -> bool:
        """Whether items were queued since the last flush."""
        return bool(self._fresh)

    def flush(self) -> None:
        """Hand the items queued since the last flush to the writing task."""
        self._queue.extend(self._fresh)
        self._fresh.clear()
        self._wake.set()

    @property
    def busy(self) -> int:
        """Number of items that are not in the log yet. After closing: 1 until the writing task ends, then 0."""
        waiting = len(self._fresh) + len(self._queue) + len(self._in_flight)
        return waiting if self._shown else int(not self._task.done())

    def close(self, linger: float) -> None:
        """Stop writing. Append the queued items for up to ``linger`` seconds."""
        self.flush()
        waits = not self._fenced and not self._task.done()
        self._hide()
        if linger > 0 and self._queue and waits:
            asyncio.get_running_loop().call_later(linger, self._end)
        else:
            self._end()

    def retire(self) -> None:
        """Append the queued items and the end of the stream, then stop writing."""
        self._fresh.append(_Gone())
        self.close(FAREWELL)

    def _hide(self) -> None:
        if self._shown:
            self._shown = False
            self._stats.queue_limit -= self._config.queue_batches
            self._stats.queue_depth -= sum(isinstance(item, Publish) for item in (*self._queue, *self._in_flight))
            self._show_fenced(fenced=False)

    def _show_overdue(self) -> None:
        """Count the stream in ``states_overdue`` if this kvbus writes its states and the newest one is overdue."""
        wanted = self._shown and not self._fenced and self._config.on_subscribe == "state"
        before, self._overdue = self._overdue, wanted and self._due.overdue(asyncio.get_running_loop().time())
        self._stats.states_overdue += self._overdue - before

    def _end(self) -> None:
        self._let_go(CLOSED)
        self._task.cancel()

    def _drop(self, reason: str, command: Publish) -> None:
        self._stats.dropped_batches[reason] += 1
        self._stats.dropped_events[reason] += command.events

    def _let_go(self, reason: str) -> None:
        """Drop all waiting items. Count their batches under a reason."""
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
                log.exception("output %s: writing %s has failed, by a defect", self._config.name, self._stream.key)
                self._lose(UNAVAILABLE)
                await asyncio.sleep(MOST_PAUSE)
            else:
                return

    async def _write(self) -> None:
        """Write the stream, one writer epoch after another, until it is closed and everything is in the log."""
        pause, before = PAUSE, ""
        while True:
            self._show_overdue()
            try:
                writer = await self._log.claim(self._stream.key)
            except (UnavailableError, FencedError) as error:
                self._count(error)
                if str(error) != before:
                    before = str(error)
                    self._say(
                        logging.WARNING, f"the log does not take %s: {error}; every {MOST_PAUSE:g} s it is asked again"
                    )
                await asyncio.sleep(pause)
                pause = min(MOST_PAUSE, 2 * pause)
                continue
            self._say(logging.INFO, f"kvbus is the writer of %s, in writer epoch {writer.epoch}")
            before, fenced, refused = "", False, False
            try:
                self._stats.streams_written += 1
                await self._turn(writer)
            except UnavailableError as error:
                self._say(logging.WARNING, f"the log is away from %s: {error}; the state follows when it is back")
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
            elif refused:  # the log may accept the claim and refuse every record, for example as too large
                await asyncio.sleep(pause)
                pause = min(MOST_PAUSE, 2 * pause)

    def _say(self, level: int, text: str) -> None:
        """Log a text about the stream. The stream's key replaces ``%s``."""
        fields = {"output": self._config.name, "stream": self._stream.key}
        log.log(level, "output %s: %s", self._config.name, text.replace("%s", self._stream.key), extra=fields)

    async def _until_left(self, epoch: int) -> None:
        """Wait until no other writer writes the stream. Otherwise two writers would fence each other forever.

        A writer puts a pointer with each state. If the pointer of the other writer does not change for long enough,
        that writer is gone. If there is no pointer, nobody writes the stream: it was erased, or its pointer was
        overwritten by something else. A broker also fences a writer that keeps a transaction open for too long. The
        pointer is then still this writer's own.
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
                    until = f"it is written again when nobody else has written it for {wait:.0f} s"
                    self._say(logging.ERROR, f"%s was taken by another writer, or erased: {until}")
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
        self._let_go(reason)
        self._asked = False
        if self._config.on_subscribe == "state":
            self._missing, self._reason = "lost", reason

    async def _turn(self, writer: Writer) -> None:
        """Write one epoch. Return when the stream is closed and everything is in the log."""
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
                elif isinstance(item, _Gone):
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
        """Check from time to time that the log still has the newest state, at which new readers begin."""
        now = asyncio.get_running_loop().time
        if not self._due.looks(now()):
            return
        kept = True  # assume that the log has it if the log cannot tell
        try:
            kept = await writer.keeps(self._due.position or START)
        except UnavailableError as error:
            self._count(error)
        self._due.looked(now(), kept=kept)

    def _ask(self) -> None:
        """Ask the relay for a state if one is due, or if one is missing and the queue is empty.

        The relay cannot give the state while the stream has no source.
        """
        now = asyncio.get_running_loop().time()
        due = self._config.on_subscribe == "state" and self._due.due(now) and not self._coming
        if ((self._missing and not self._queue) or due) and now >= self._ask_at:
            self._asked, self._ask_at = True, now + ASK_AGAIN
            self._feed(self._asks)

    async def _append_batches(self, writer: Writer) -> None:
        """Append the queued batches together, up to the limits of one append."""
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
        """Append a state, then a pointer to it."""
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
                # packing a large payload takes milliseconds, and releases the GIL
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
                f"nothing was appended for {now - before:.0f} s: readers may have given the epoch up"
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
        """Return the next record of the epoch.

        Raises:
            UnavailableError: the epoch has no seq left.
        """
        if not self._block_size and payload:
            self._block_size = block_size_of(payload)
        if self._seq >= LAST:
            raise UnavailableError("the epoch has no number left, so another one begins")
        numbers = (writer.epoch, self._seq)
        record = Record(SCHEMA, kind, *numbers, payload, origin, self._block_size, more, resync, packed=False)
        self._seq += 1
        return record
