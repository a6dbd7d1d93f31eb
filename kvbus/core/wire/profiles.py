"""Profiles: what a family of routers reads, and the bytes that follow from it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import structs

from kvbus.core.types import Hash
from kvbus.core.wire.codec import AnyEvent, encode_batch, encode_positional_batch
from kvbus.core.wire.frames import Framing
from kvbus.core.wire.schema import AllBlocksCleared

Encoding = Literal["map", "array"]


class Wire(msgspec.Struct, frozen=True):
    """How a batch is written. Outputs of equal wire share the bytes."""

    encoding: Encoding = "map"
    fold_hashes: bool = False
    """Byte hashes leave as unsigned 64-bit integers, their last eight bytes (vLLM's own rule for integer hashes)."""
    media: tuple[tuple[str, str], ...] = ()
    """Names of media that this family does not know, and the ones it has for their tier."""

    def accepts_as_is(self, *, bytes_hashes: bool, media: Container[str]) -> bool:
        """Whether canonical map events with such hashes and media need no translation on this wire."""
        if self.encoding != "map" or (bytes_hashes and self.fold_hashes):
            return False
        return not self.media or all(known not in media for known, _ in self.media)


class Profile(msgspec.Struct, frozen=True):
    """A wire, and what a replay looks like."""

    wire: Wire = Wire()
    framing: Framing = "4"
    filled_replay: bool = True
    """Whether an answer that reaches behind the journal is contiguous from the seq asked for. Where it need not be, END
    alone sends the router back to the state that its subscription brought."""


CANONICAL: Final = Wire()
"""Maps, with hashes and media as the engine named them."""

_DYNAMO: Final = Wire("map", fold_hashes=True, media=(("FS", "DISK"), ("OBJ", "EXTERNAL")))

PROFILES: Final[dict[str, Profile]] = {
    "vllm": Profile(CANONICAL, "4"),
    "dynamo": Profile(_DYNAMO, "4", filled_replay=False),
    "llm-d": Profile(CANONICAL, "4"),
    "aibrix": Profile(Wire("array"), "4", filled_replay=False),
    "sglang": Profile(CANONICAL, "3"),
}
"""By the name of ``outputs[].profile``. Sources: Dynamo 1.6.1 (measured, docs/INTEROP.md) takes both framings, decodes
no byte hash and drops ``FS`` and ``OBJ``; llm-d reads framing 4; AIBrix arrays only; sgl-router's client framing 3."""


def encode(wire: Wire, events: Sequence[AnyEvent], ts: float, rank: int) -> bytes:
    """One batch: always an array of exactly three, ``[ts, events, rank]``."""
    if wire.fold_hashes or wire.media:
        events = [_translated(wire, event) for event in events]
    return encode_batch(events, ts, rank) if wire.encoding == "map" else encode_positional_batch(events, ts, rank)


def fold(block: Hash) -> int:
    """A byte hash as the 64-bit integer vLLM would have sent for it (``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES``)."""
    return int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block


def _translated(wire: Wire, event: AnyEvent) -> AnyEvent:
    """The event with the hashes and media of this wire; the same object where nothing changes."""
    if isinstance(event, AllBlocksCleared):
        return event
    hashes, medium = (
        (event["block_hashes"], event["medium"]) if isinstance(event, dict) else (event.block_hashes, event.medium)
    )
    changes: dict[str, Any] = {}
    if wire.fold_hashes and isinstance(hashes[0], bytes):
        changes["block_hashes"] = [fold(block) for block in hashes]
        parent = (
            event.get("parent_block_hash") if isinstance(event, dict) else getattr(event, "parent_block_hash", None)
        )
        if parent is not None:
            changes["parent_block_hash"] = fold(parent)
    for known, wanted in wire.media:
        if medium == known:
            changes["medium"] = wanted
    if not changes:
        return event
    return {**event, **changes} if isinstance(event, dict) else structs.replace(event, **changes)
