"""What a subscriber that comes late gets, compared with what those before it get (section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvbus.tools.conform.engine.events import EventReader, Hash, Place
from kvbus.tools.conform.engine.ledger import Ledger
from kvbus.tools.conform.engine.stream import Message, Stream
from kvbus.tools.conform.verdict import Evidence

STATE_EVENTS: Final = 4096
STATE_BYTES: Final = 4 * 1024 * 1024

View = set[tuple[Place, Hash]]


def judge_late(ledger: Ledger, joined: Sequence[Message], others: Mapping[int, bytes], live: View | None) -> int:
    """Judge what a late subscriber got.

    Args:
        ledger: what was seen of each clause.
        joined: what it got, in order.
        others: what an earlier subscriber got meanwhile, by number.
        live: what is live at the last batch that it got; None where nobody knows.

    Returns:
        How many batches of it were the state.
    """
    if not joined:
        ledger.broken("5.1", "a second subscriber got nothing, while blocks were live")
        return 0
    own = Stream(Ledger())
    first = own.take(joined[0])
    shown = Evidence(f"payload of batch {joined[0].seq}", joined[0].payload)
    if first is None or not first.clears_first:
        ledger.broken("5.1", f"a second subscriber got batch {joined[0].seq}, without AllBlocksCleared", shown)
        return 0
    for message in joined[1:]:
        own.take(message)
    _compare(ledger, own.blocks.live, live, shown)
    state = 0
    for message in joined:
        other = others.get(message.seq)
        if other == message.payload or other is None:
            break
        state += 1
        _batch_of_state(ledger, message, other)
    return state


def _compare(ledger: Ledger, view: View, live: View | None, shown: Evidence) -> None:
    if live is None:
        ledger.unseen("5.1", "too much was going on to compare a second subscriber's view")
    elif view == live:
        ledger.kept("5.1")
    else:
        missing, dead = len(live - view), len(view - live)
        ledger.broken("5.1", f"of a second subscriber's {len(view)} blocks {missing} are missing, {dead} dead", shown)


def _batch_of_state(ledger: Ledger, message: Message, other: bytes) -> None:
    reader = EventReader(Ledger())
    meanwhile, own = reader.read(other, message.seq), EventReader(Ledger()).read(message.payload, message.seq)
    if meanwhile is not None and meanwhile.empty:
        ledger.kept("5.2")
    else:
        text = f"batch {message.seq} is one of a state, and others got events under this number"
        ledger.broken("5.2", text, Evidence("what others got", other))
    if own is None:
        return
    if len(own.events) <= STATE_EVENTS and own.size < STATE_BYTES:
        ledger.kept("5.4")
    else:
        ledger.broken("5.4", f"batch {message.seq} of a state has {len(own.events):,} events in {own.size:,} bytes")
