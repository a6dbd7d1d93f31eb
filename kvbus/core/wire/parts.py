"""Parts of a store: some of its blocks as an event of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET, Raw, structs

from kvbus.core.types import Hash
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import decode_value, encode_value
from kvbus.core.wire.schema import PER_BLOCK, AllBlocksCleared, BlockStored
from kvbus.core.wire.tokens import are_pairs

NOTHING: Final = encode_value([])
"""No tokens, in a field that every decoder asks for."""

CONTENT: Final = frozenset({"token_ids", "extra_keys", "session_id", "cache_salt", "lookahead_token_ids"})
"""The fields of a store that hold tokens, name images and adapters of a prompt, or say whose it is."""

_ROUTING: Final = {"type", *BlockStored.__struct_fields__} - CONTENT


_decode_entries: Final = msgspec.msgpack.Decoder(list[Raw]).decode


def is_store(event: AnyEvent) -> bool:
    """Whether blocks enter a cache."""
    return "token_ids" in event if isinstance(event, dict) else hasattr(event, "token_ids")


def field(event: AnyEvent, name: str) -> Any:
    """A field of any form of event; UNSET where it has none, or was not sent."""
    return event.get(name, UNSET) if isinstance(event, dict) else getattr(event, name, UNSET)


def value(event: AnyEvent, name: str) -> Any:
    """A field of any form of event; None where it has none, or was not sent."""
    found = field(event, name)
    return None if found is UNSET else found


def hashes_of(event: AnyEvent) -> Sequence[Hash]:
    """The blocks that an event names."""
    return () if isinstance(event, AllBlocksCleared) else cast("Sequence[Hash]", field(event, "block_hashes"))


def changed(event: AnyEvent, changes: dict[str, Any]) -> AnyEvent:
    """A copy of the event with other fields, UNSET for none; the event itself where nothing changes."""
    if not changes:
        return event
    if isinstance(event, dict):
        return {name: value for name, value in {**event, **changes}.items() if value is not UNSET}
    return structs.replace(event, **changes)


def parts(event: AnyEvent, runs: Sequence[tuple[int, int]]) -> list[AnyEvent]:
    """Blocks ``[first, end)`` of a store or a removal for each of the runs."""
    hashes = hashes_of(event)
    if len(runs) == 1 and runs[0] == (0, len(hashes)):
        return [event]
    if not is_store(event):
        return [changed(event, {"block_hashes": hashes[first:end]}) for first, end in runs]
    if not runs:
        return []
    tokens = decode_value(field(event, "token_ids"))
    count = len(hashes)
    lists = {name: each for name in PER_BLOCK if (each := _entries(field(event, name), count)) is not None}
    size = field(event, "block_size")
    found = []
    for first, end in runs:
        changes: dict[str, Any] = {
            "block_hashes": hashes[first:end],
            "token_ids": encode_value(tokens[first * size : end * size]),
        }
        if first:
            changes["parent_block_hash"] = hashes[first - 1]
        for name, entries in lists.items():
            changes[name] = encode_value(entries[first:end])
        found.append(changed(event, changes))
    return found


def extras_of(extras: Mapping[str, Raw | bytes], count: int, first: int, end: int) -> dict[str, Raw]:
    """Fields no struct knows, of blocks ``[first, end)`` of so many; nobody has looked at what they hold."""
    found = {name: Raw(value) for name, value in extras.items()}
    if end - first < count:
        for name in PER_BLOCK:
            entries = _entries(found.get(name), count)
            if entries is not None:
                found[name] = encode_value(entries[first:end])
    return found


def _entries(raw: Any, count: int) -> list[Raw] | None:
    """The entries of a list with one for each of so many blocks; None if it is anything else."""
    try:
        entries = _decode_entries(raw) if isinstance(raw, Raw) else []
    except msgspec.DecodeError:
        return None
    return entries if len(entries) == count else None


def without_content(event: AnyEvent) -> AnyEvent:
    """A store without token ids, and without what else tells of a prompt or of who sent it; any other as it is.

    A field that no struct knows may be anything, so it does not leave either.
    """
    if not is_store(event):
        return event
    if isinstance(event, dict):
        return {name: each for name, each in event.items() if name in _ROUTING} | {"token_ids": NOTHING}
    return structs.replace(
        event, token_ids=NOTHING, extra_keys=UNSET, session_id=UNSET, cache_salt=UNSET, lookahead_token_ids=UNSET
    )


def block_by_block(event: AnyEvent) -> list[AnyEvent]:
    """A store as one event for each of its blocks; any other event as it is."""
    count = len(hashes_of(event))
    if count < 2 or not is_store(event):
        return [event]
    return parts(event, [(at, at + 1) for at in range(count)])


def first_of_pairs(event: AnyEvent) -> AnyEvent:
    """A store whose tokens are EAGLE's pairs ``[a, b]`` as one with the first token of each; any other as it is."""
    if not is_store(event):
        return event
    raw = field(event, "token_ids")
    if not are_pairs(raw):
        return event
    return changed(event, {"token_ids": encode_value([first for first, _ in decode_value(raw)])})
