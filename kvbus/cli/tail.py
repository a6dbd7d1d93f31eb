"""``kvbus tail``: print the decoded batches of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import click
from msgspec import UnsetType

from kvbus.cli.curve import curve_keys, curve_options
from kvbus.cli.reach import explained
from kvbus.cli.until import run_until_signal, say, until
from kvbus.client.subscriber import Subscriber
from kvbus.client.updates import (
    Conflict,
    Gap,
    Lost,
    Reachable,
    Received,
    Rejected,
    Restarted,
    Snapshot,
    Synced,
    Unreachable,
)
from kvbus.core.types import HASH_FORMS, Reason
from kvbus.core.wire.schema import Batch, BlockRemoved, BlockStored
from kvbus.core.wire.tokens import decode_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvbus.client.updates import Update
    from kvbus.core.types import Hash
    from kvbus.core.wire.schema import Event

_SHOWN_HASHES: Final = 4


class Printer:
    """A printer of a stream's updates as text or JSON lines. It also counts batches, events and lost batches."""

    def __init__(self, out: TextIO, *, as_json: bool, hashes: str = "number") -> None:
        self._hashes = hashes
        self.shown = self.batches = self.events = self.missing = 0
        self._out = out
        self._json = as_json
        # Any non-empty NO_COLOR turns colour off (https://no-color.org). Files and pipes never get colour.
        self._colour = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def show(self, update: Update) -> None:
        """Print one update of the stream, and add it to the counters."""
        self.shown += not isinstance(update, Unreachable | Reachable)
        if isinstance(update, Received):
            self.batches += 1
            self.events += len(update.batch.events)
        elif isinstance(update, Snapshot):
            self.events += sum(len(batch.events) for batch in update.batches)
        elif isinstance(update, Lost) and update.last is not None:
            self.missing += update.last - update.first + 1
        if self._json:
            self._out.write(json.dumps(to_json(update, self._hashes), separators=(",", ":")) + "\n")
        else:
            for text, colour in _lines(update):
                line = click.style(text, fg=colour) if self._colour and colour else text
                self._out.write(line + "\n")

    def flush(self) -> None:
        """Flush the output."""
        self._out.flush()

    def summary(self) -> str:
        """Return one line with the numbers of batches, events and lost batches."""
        lost = f", {self.missing} lost" if self.missing else ""
        return f"{self.batches} batches, {self.events} events{lost}"


def to_json(update: Update, hashes: str = "number") -> dict[str, Any]:
    """Return an update of the stream as a dictionary for JSON. Its first key is ``kind``.

    Byte hashes are written as hex strings. ``hashes`` says how integer hashes are written, as one of
    :data:`~kvbus.core.types.HASH_FORMS`.
    """
    plain: dict[str, Any] = {"kind": update.kind}
    if isinstance(update, Received):
        plain |= {"seq": update.seq, "topic": _text(update.topic), "replayed": update.replayed}
        plain |= _batch_json(update.batch, hashes)
    elif isinstance(update, Snapshot):
        plain |= {"seq": update.seq, "batches": [_batch_json(batch, hashes) for batch in update.batches]}
    elif isinstance(update, Rejected):
        plain |= {"seq": update.seq, "topic": _text(update.topic), "reason": str(update.reason)}
    elif isinstance(update, Gap):
        plain |= {"first": update.first, "last": update.last}
    elif isinstance(update, Lost):
        plain |= {"first": update.first, "last": update.last, "reason": str(update.reason)}
    elif isinstance(update, Restarted):
        plain |= {"epoch": update.epoch, "reason": str(update.reason)}
    elif isinstance(update, Synced):
        plain |= {"seq": update.seq}
    elif not isinstance(update, Conflict):
        plain |= {"endpoint": update.endpoint}
        if isinstance(update, Unreachable):
            plain |= {"why": update.why}
    return plain


def _batch_json(batch: Batch, hashes: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"ts": batch.ts, "rank": batch.rank}
    plain["events"] = [_event_json(event, HASH_FORMS[hashes]) for event in batch.events]
    if batch.rejects:
        plain["rejects"] = [str(reason) for reason in batch.rejects]
    return plain


def _event_json(event: Event, written: Callable[[Hash | None], int | str | None]) -> dict[str, Any]:
    if isinstance(event, BlockStored):
        tokens = decode_tokens(event.token_ids)
        plain = {
            "type": "BlockStored",
            "block_hashes": [written(block) for block in event.block_hashes],
            "parent_block_hash": written(_parent(event)),
            "token_ids": None if isinstance(tokens, Reason) else tokens,
            "block_size": event.block_size,
            "medium": event.medium,
        }
        for name in ("lora_id", "lora_name", "group_idx", "kv_cache_spec_kind"):
            value = getattr(event, name)
            if isinstance(value, (int, str)):
                plain[name] = value
        return plain
    if isinstance(event, BlockRemoved):
        plain = {"type": "BlockRemoved", "block_hashes": [written(block) for block in event.block_hashes]}
        plain["medium"] = event.medium
        if isinstance(event.group_idx, int):
            plain["group_idx"] = event.group_idx
        return plain
    plain = {"type": "AllBlocksCleared"}
    return plain | {"medium": event.medium} if isinstance(event.medium, str) else plain


def _lines(update: Update) -> list[tuple[str, str | None]]:
    if isinstance(update, Received):
        return _batch_lines(update.seq, update.topic, update.batch, sign="r" if update.replayed else " ")
    if isinstance(update, Snapshot):
        return _snapshot_lines(update)
    if isinstance(update, Rejected):
        return [(f"{'' if update.seq is None else update.seq:>8}   ! unreadable: {update.reason}", "red")]
    if isinstance(update, Gap):
        return [(f"{'':>8}   ~ gap {_span(update.first, update.last)}, requesting the missing batches", "yellow")]
    if isinstance(update, Lost):
        return [(f"{'':>8}   ! lost {_span(update.first, update.last)} ({update.reason})", "red")]
    if isinstance(update, Restarted):
        return [(f"{'':>8}   * the publisher restarted ({update.reason})", "magenta")]
    if isinstance(update, Conflict):
        return [(f"{'':>8}   ! several publishers send on this endpoint: waiting", "red")]
    if isinstance(update, Unreachable):
        return [(f"{'':>8}   ! no connection: {update.why}", "red")]
    if isinstance(update, Reachable):
        return [(f"{'':>8}   = connected to {update.endpoint}", "cyan")]
    return [
        (
            f"{'':>8}   = synced up to seq {update.seq}" if update.seq >= 0 else f"{'':>8}   = synced, no batch yet",
            "cyan",
        )
    ]


def _batch_lines(seq: int, topic: bytes, batch: Batch, *, sign: str) -> list[tuple[str, str | None]]:
    head = f"{seq:>8} {sign} "
    tail = "" if batch.rank is None else f"  rank {batch.rank}"
    if topic:
        tail += f"  {_text(topic)}"
    lines: list[tuple[str, str | None]] = []
    for event in batch.events:
        lines.append((f"{head}{_event_line(event)}{tail}", _COLOURS[type(event).__name__]))
        head = " " * len(head)
    lines += [(f"{head}! rejected event: {reason}", "red") for reason in batch.rejects]
    return lines or [(f"{head}. empty batch{tail}", None)]


def _snapshot_lines(snapshot: Snapshot) -> list[tuple[str, str | None]]:
    lines: list[tuple[str, str | None]] = [
        (f"{'':>8}   = snapshot at seq {snapshot.seq}, which replaces all earlier blocks", "cyan")
    ]
    for batch in snapshot.batches:
        lines += _batch_lines(snapshot.seq, b"", batch, sign="s")
    return lines


_COLOURS: Final = {"BlockStored": "green", "BlockRemoved": "blue", "AllBlocksCleared": "magenta"}


def _event_line(event: Event) -> str:
    if isinstance(event, BlockStored):
        where = f"{event.medium or 'device'}{_group(event.group_idx)}"
        before = _parent(event)
        parent = "root" if before is None else _short(before)
        return f"+ stored  {_hashes(event.block_hashes)}  x{event.block_size} tokens  {where}  after {parent}"
    if isinstance(event, BlockRemoved):
        return f"- removed {_hashes(event.block_hashes)}  {event.medium or 'device'}{_group(event.group_idx)}"
    return "* all blocks cleared"


def _parent(event: BlockStored) -> Hash | None:
    return None if isinstance(event.parent_block_hash, UnsetType) else event.parent_block_hash


def _hashes(hashes: Sequence[Hash]) -> str:
    shown = " ".join(_short(block) for block in hashes[:_SHOWN_HASHES])
    rest = len(hashes) - _SHOWN_HASHES
    return f"{len(hashes)} [{shown}{f' +{rest}' if rest > 0 else ''}]"


def _short(block: Hash) -> str:
    return block.hex()[:12] if isinstance(block, bytes) else str(block)


def _group(group: object) -> str:
    return f" g{group}" if isinstance(group, int) else ""


def _span(first: int, last: int | None) -> str:
    if last is None:
        return f"{first} and up"
    return str(first) if first == last else f"{first} to {last}"


def _text(raw: bytes) -> str:
    # Escape unprintable characters, so that a topic from an untrusted publisher cannot send control codes to the
    # terminal.
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in raw.decode("utf-8", "backslashreplace"))


async def watch(subscriber: Subscriber, printer: Printer, *, count: int | None, seconds: float | None) -> None:
    """Print the subscriber's updates until `count` batches have come or `seconds` seconds have passed.

    If `count` or `seconds` is None, it does not limit the time of watching.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while count is None or printer.batches < count:
                printer.show(await subscriber.receive())
                if not subscriber.pending:
                    printer.flush()
    printer.flush()


@click.command("tail", short_help="Print a stream, decoded.")
@click.argument("endpoint")
@click.option(
    "--replay-endpoint",
    metavar="ENDPOINT",
    help="The publisher's replay endpoint, from which kvbus requests missing batches.",
)
@click.option(
    "--snapshot-endpoint",
    metavar="ENDPOINT",
    help="The publisher's snapshot endpoint, which is used after a restart and after a gap that no replay fills.",
)
@click.option(
    "--from-start",
    is_flag=True,
    help="Begin with a snapshot, or a replay from seq 0 (needs --snapshot-endpoint or --replay-endpoint).",
)
@click.option("--topic", default="", help="Print only topics with this prefix.  [default: all topics]")
@click.option("--bind", is_flag=True, help="Bind ENDPOINT, for publishers that connect to it.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object per line, of kind batch, snapshot, gap, lost, restarted, …",
)
@click.option(
    "--hashes",
    type=click.Choice(list(HASH_FORMS)),
    default="number",
    show_default=True,
    help="How --json writes integer hashes. Use string for jq and browsers, which change large numbers.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="Stop after N batches.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), metavar="S", help="Stop after S seconds.")
@curve_options
def command(
    *,
    endpoint: str,
    replay_endpoint: str | None,
    snapshot_endpoint: str | None,
    from_start: bool,
    topic: str,
    bind: bool,
    as_json: bool,
    hashes: str,
    count: int | None,
    seconds: float | None,
    curve_secret_key: Path | None,
    curve_server_key: Path | None,
) -> None:
    """Print the KV-cache events of an engine or of kvbus, decoded.

    \b
    Examples:
      kvbus tail tcp://127.0.0.1:5557
      kvbus tail tcp://10.0.0.7:5657 --replay-endpoint tcp://10.0.0.7:5658 --from-start
      kvbus tail tcp://127.0.0.1:5557 --json --count 100 | jq '.events[].type'
      kvbus tail 'tcp://*:5557' --bind          # the engine dials in

    Batches appear in order, and gaps are shown. A replay endpoint fills gaps. A snapshot endpoint gives the state
    after a gap. Ctrl-C stops.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if from_start and replay_endpoint is None and snapshot_endpoint is None:
        raise click.UsageError(
            "--from-start needs --replay-endpoint or --snapshot-endpoint, for example tcp://127.0.0.1:5558"
        )
    curve = curve_keys(curve_secret_key, curve_server_key, bind=bind)
    printer = Printer(sys.stdout, as_json=as_json, hashes=hashes)

    async def session(stop: asyncio.Event) -> None:
        subscriber = Subscriber(
            endpoint,
            replay_endpoint,
            snapshot_endpoint=snapshot_endpoint,
            topic=topic.encode(),
            bind=bind,
            from_start=from_start,
            curve=curve,
        )
        try:
            subscriber.open()
        except ValueError as error:
            raise click.UsageError(f"{error}; for example tcp://127.0.0.1:5557") from error
        try:
            watching = until(stop, watch(subscriber, printer, count=count, seconds=seconds))
            if bind:
                say(f"listening on {subscriber.endpoint}")
                await watching
            else:
                async with explained(endpoint, curve, lambda: printer.shown > 0):
                    await watching
        finally:
            await subscriber.aclose()
        printer.flush()

    run_until_signal(session)
    say(printer.summary())
