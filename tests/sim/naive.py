"""A simple correct reader for tests of the engine simulator. It reads all dialects.

It only decodes the events and counts the copies of blocks.
"""

from collections import Counter
from typing import Any

from tests.doubles.router import events_of as named_events_of


def events_of(payload):
    """Return the type and the fields of every event of a batch, whether the event is an array or a map."""
    for event in named_events_of(payload):
        yield event.pop("type"), event


def printable(value):
    return value.hex() if isinstance(value, bytes) else value


def apply(payloads):
    """Apply batches. Return the number of live copies, by (group_idx, medium, hash).

    Fail if an event removes a block that is not live.
    """
    live = Counter[Any]()
    for payload in payloads:
        for tag, fields in events_of(payload):
            if tag == "AllBlocksCleared":
                live = Counter({key: n for key, n in live.items() if key[1] not in (None, "GPU")})
                continue
            for value in fields["block_hashes"]:
                key = (fields.get("group_idx"), fields.get("medium"), printable(value))
                live[key] += 1 if tag == "BlockStored" else -1
                assert live[key] >= 0, (tag, key)
    return +live


def truth_of(entries):
    return Counter({(e["group_idx"], e["medium"], e["hash"]): e["copies"] for e in entries})
