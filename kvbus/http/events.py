"""``GET /events``: a stream of server-sent events, for clients that do not speak ZeroMQ.

It contains the changes of sources and routers, and the rates once a second. Clients with the right to content can also
request the batches of an output. kvbus queues nothing for a client. Each client has positions in data that kvbus keeps
anyway: the timeline of changes, the newest sample of the rates, and the journals of an output. A client reads from them
at its own pace, so a client costs no memory. A slow client misses only data that kvbus no longer keeps. It then gets an
event that states which data it has missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import msgspec
from aiohttp import web

from kvbus.core.outputs.output import Output
from kvbus.core.stats import ProcessStats
from kvbus.core.types import Hash, Reason, printable
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.encoding import decode_value
from kvbus.core.wire.schema import AllBlocksCleared, BlockStored, Event
from kvbus.http.answers import write
from kvbus.http.content_log import Reading, current
from kvbus.http.history import History
from kvbus.http.timeline import Timeline

MAX_LISTENERS: Final = 16
"""Maximum number of clients of ``/events``. Further requests get the status 503."""

MAX_FOLLOWERS: Final = 4
"""Maximum number of clients of ``/events`` that get batches, of all outputs together. Further requests get a 503."""

PART: Final = 32
"""Maximum number of events of one batch that kvbus sends to a client in one iteration of the event loop."""

MAX_POSITIONS: Final = 256
"""Maximum number of streams of an output whose next seqs the id of an event contains.

Clients send the id back in a header of limited size. If the output has more streams, a client cannot resume the batches
after a reconnection.
"""


class Listener:
    """One client of ``/events``.

    Attributes:
        number: the number of the last transition (change of a source or router) sent to the client.
        sampled: the number of the last sample of the rates sent to the client.
        output: the output whose batches the client gets; None if it gets no batches.
        reading: counters of the blocks and bytes sent to the client, for the content log; None if it gets no batches.
        seqs: the next seq of each stream of the output, by slot.
    """

    def __init__(self, output: Output | None, reading: Reading | None = None) -> None:
        self.reading = reading
        self.number = 0
        self.sampled = 0
        self.output = output
        self.seqs: dict[int, int] = {}
        self.batches: Iterator[tuple[int, bytes]] | None = None
        """The unsent parts of the batches that are being sent, each with its number of blocks; None without batches."""
        self.wake = asyncio.Event()

    def id_in(self, process: str) -> str:
        """Return the id with which the client can resume the stream after a reconnection.

        Args:
            process: the identifier of this kvbus process.
        """
        head = f"{process}-{self.number}"
        if not 0 < len(self.seqs) <= MAX_POSITIONS:
            return head
        return f"{head}-{','.join(f'{slot}:{seq}' for slot, seq in self.seqs.items())}"


class Events:
    """The connected clients of ``/events``, and the methods that send events to them."""

    def __init__(self, timeline: Timeline, history: History, stats: ProcessStats) -> None:
        self._timeline = timeline
        self._history = history
        self._stats = stats
        self._listeners: set[Listener] = set()
        self._samples = 0
        self._news = (0, 0)
        self._rates = b""
        self._closed = False

    def room(self, output: Output | None) -> bool:
        """Return whether the limits admit one more client.

        The client requests the batches of ``output``, or no batches if this is None.
        """
        followers = sum(each.output is not None for each in self._listeners)
        return len(self._listeners) < MAX_LISTENERS and (output is None or followers < MAX_FOLLOWERS)

    def sampled(self) -> None:
        """Record that the history has a new sample of the rates, so that all clients get it."""
        self._samples += 1
        self._rates = b""

    def wake(self) -> None:
        """Wake the clients for which there may be new batches, transitions or samples."""
        before, self._news = self._news, (self._timeline.last, self._samples)
        for listener in self._listeners:
            if listener.output is not None or self._news != before:
                listener.wake.set()

    def close(self) -> None:
        """End the answers to all clients."""
        self._closed = True
        for listener in self._listeners:
            listener.wake.set()

    async def answer(self, request: web.Request, output: Output | None, last_id: str) -> web.StreamResponse:
        """Send events to a client until it disconnects or the server closes.

        Args:
            request: the client's request.
            output: the output whose batches the client gets; None for no batches.
            last_id: the id of the last event that the client has received; empty if the client does not resume a
                stream.

        Raises:
            TimeoutError: the client reads too slowly.
        """
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        listener = Listener(output, None if output is None else current.get())
        self._listeners.add(listener)
        self._stats.http_listeners = len(self._listeners)
        try:
            await response.prepare(request)
            part = b"retry: 1000\n" + self._start(listener, last_id)
            while not self._closed:
                if not part:
                    await listener.wake.wait()
                    listener.wake.clear()
                else:
                    await write(response, part)
                    await asyncio.sleep(0)
                part = self._next(listener)
        finally:
            self._listeners.discard(listener)
            self._stats.http_listeners = len(self._listeners)
        return response

    def _start(self, listener: Listener, last_id: str) -> bytes:
        """Set where a client begins to read changes and batches, and return the event ``start``.

        The event ``start`` says whether the client continues after the last event that it has received, whose id is
        ``last_id``. Without a usable id, the client gets only data that is newer than this call.
        """
        because = self._resume(listener, last_id) if last_id else ""
        if because or not last_id:
            listener.number = self._timeline.last
            listener.seqs = {} if listener.output is None else _ends(listener.output)
        data = {"resumed": not because if last_id else None, "because": because}
        return _event("start", data, listener.id_in(self._timeline.process))

    def _resume(self, listener: Listener, last_id: str) -> str:
        """Let a client continue after the event with the id ``last_id``.

        Set the numbers of the next change and batches that the client gets.

        Return the reason why the client cannot continue there; empty if it can.
        """
        process, _, rest = last_id.partition("-")
        number, _, seqs = rest.partition("-")
        if not number.isdecimal():
            return "the id is not valid; use the id of an earlier event"
        if process != self._timeline.process:
            return "the id is of an earlier process: kvbus has restarted since"
        try:
            listener.number = int(number)
            listener.seqs = {int(slot): int(seq) for slot, seq in (each.split(":") for each in seqs.split(",") if each)}
        except ValueError:
            return "the id is not valid; use the id of an earlier event"
        if not self._timeline.first - 1 <= listener.number <= self._timeline.last:
            return f"transitions are kept from {self._timeline.first} to {self._timeline.last}"
        if listener.output is None:
            listener.seqs = {}
            return ""
        ends = _ends(listener.output)
        if listener.seqs.keys() != ends.keys() or any(listener.seqs[slot] > end for slot, end in ends.items()):
            return f"the id does not match the streams of output {listener.output.spec.name}"
        return ""

    def _next(self, listener: Listener) -> bytes:
        """Return the next part of the stream for a client; empty if there is nothing new."""
        process, parts = self._timeline.process, []
        if listener.number < self._timeline.first - 1:
            missed = {"from": listener.number + 1, "to": self._timeline.first - 1}
            listener.number = self._timeline.first - 1
            parts.append(_event("missed", {"what": "transitions", **missed}))
        for transition in self._timeline.since(listener.number):
            listener.number = transition.number
            parts.append(_event("transition", transition, listener.id_in(process)))
        if listener.sampled != self._samples:
            listener.sampled = self._samples
            self._rates = self._rates or _event("rates", self._history.newest)
            parts.append(self._rates)
        if listener.output is not None and listener.batches is None and listener.seqs != _ends(listener.output):
            listener.batches = self._batches(listener, listener.output)
        if listener.batches is not None:
            blocks, part = next(listener.batches, (0, b""))
            parts.append(part)
            if listener.reading is not None:
                listener.reading.add(blocks, len(part))
            if not part:
                listener.batches = None
        return b"".join(parts)

    def _batches(self, listener: Listener, output: Output) -> Iterator[tuple[int, bytes]]:
        """Yield, in parts, the batches of an output that a client has not got, from the journals of the streams.

        Each part comes with the number of blocks that it contains.
        """
        process, streams, ends = self._timeline.process, output.open_streams, _ends(output)
        listener.seqs = {slot: listener.seqs.get(slot, streams[slot].first_seq) for slot in ends}
        for slot, end in ends.items():
            journal = streams[slot].journal
            while (seq := listener.seqs[slot]) != end:
                entry = journal.find(seq)
                if entry is None:
                    kept = journal.first_seq
                    listener.seqs[slot] = end if kept is None or not seq < kept <= end else kept
                    missed = {"what": "batches", "stream": slot, "from": seq, "to": listener.seqs[slot] - 1}
                    yield 0, _event("missed", missed, listener.id_in(process))
                    continue
                after = min(end, entry.seq + entry.batches)
                data: dict[str, Any] = {"output": output.spec.name, "stream": slot, "seq": seq}
                events = batch_events(entry.payload)
                event = next(events, None)
                while event is not None:
                    some, event = [event, *islice(events, PART - 1)], next(events, None)
                    if event is None:
                        # Set the seq only at the batch's last part: a client resumes after its last complete batch.
                        listener.seqs[slot] = after
                    last_id = "" if event else listener.id_in(process)
                    blocks = sum(len(each.get("block_hashes", ())) for each in some)
                    yield blocks, _event("batch", {**data, "more": event is not None, "events": some}, last_id)
                listener.seqs[slot] = after


def _ends(output: Output) -> dict[int, int]:
    """Return the next seq of each open stream of an output, by slot."""
    return {slot: stream.next_seq for slot, stream in output.open_streams.items()}


def _event(name: str, data: Any, last_id: str = "") -> bytes:
    head = f"id: {last_id}\n" if last_id else ""
    return f"{head}event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


def batch_events(payload: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of an outgoing batch as plain JSON data.

    Hashes are strings, because a JSON number in a browser cannot hold 64 bits.
    """
    batch = decode_batch(payload)
    return iter(()) if isinstance(batch, Reason) else map(_event_json, batch.events)


def _event_json(event: Event) -> dict[str, Any]:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    data: dict[str, Any] = {"type": type(event).__name__, "block_hashes": [_name(each) for each in event.block_hashes]}
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        data["parent_block_hash"] = None if parent is None or parent is msgspec.UNSET else _name(parent)
        data |= {"token_ids": decode_value(event.token_ids), "block_size": event.block_size}
        data |= {"lora_name": event.lora_name}
    data |= {"medium": event.medium, "group_idx": event.group_idx}
    return {name: value for name, value in data.items() if value is not msgspec.UNSET}


def _name(block: Hash) -> str:
    return str(printable(block))
