"""Profiles: what a family of routers reads, and the bytes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, structs

from kvbus.core.types import Hash
from kvbus.core.wire.carried import readable
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import (
    NOTHING,
    block_by_block,
    changed,
    encode_batch,
    encode_positional_batch,
    field,
    first_of_pairs,
    is_store,
    value,
    without_adapter_key,
    without_content,
)
from kvbus.core.wire.frames import Framing
from kvbus.core.wire.schema import AllBlocksCleared, HashOnlyRemoved

Encoding = Literal["map", "array"]

Clears = Literal["rank", "pod", "pod or nothing"]
"""What a router of this family forgets at AllBlocksCleared: the blocks of the batch's rank, those of all ranks of the
pod, or, because some versions ignore it, either those or nothing."""

Topics = Literal["any", "pod and model", "empty", "kv-events"]
"""The topics that a router of this family takes: any, ``kv@POD@MODEL``, the empty one alone, or ``kv-events`` alone."""


class Wire(msgspec.Struct, frozen=True, cache_hash=True):
    """How a batch is written. Outputs of equal wire share the bytes."""

    encoding: Encoding = "map"
    fold_hashes: bool = False
    """Byte hashes leave as unsigned 64-bit integers, their last eight bytes (vLLM's own rule for integer hashes)."""
    media: tuple[tuple[str, str], ...] = ()
    """Names of media that this family does not know, and the ones it has for their tier."""
    one_block: bool = False
    """A store holds one block, for a family that hashes every block of a store under the store's own parent."""
    fill_kinds: bool = False
    """A store with a group and no kind leaves as ``full_attention`` (vLLM 0.20 and 0.21 name none), for a family that
    drops it otherwise. Groups of a kind that carries no prefixes have been left out before."""
    fold_pairs: bool = False
    """EAGLE's pairs leave as their first tokens, for a family that reads plain tokens alone."""
    drop_adapter_key: bool = False
    """Extra keys leave without the adapter's name, for a family that takes every text among them for an image."""
    drop_group: bool = False
    """Groups leave without their number. See :attr:`Profile.one_group`."""
    strict: bool = False
    """The family hashes the tokens of each store itself. Blocks without tokens do not leave."""
    drop_tokens: bool = False
    """Stores leave without token ids, and without whatever else tells of a prompt or of who sent it."""

    @property
    def by_event(self) -> bool:
        """Whether events have to be looked at one by one."""
        return bool(
            self.fold_hashes
            or self.media
            or self.one_block
            or self.fill_kinds
            or self.fold_pairs
            or self.drop_adapter_key
            or self.drop_group
            or self.drop_tokens
        )


class Profile(msgspec.Struct, frozen=True):
    """A wire, what a replay looks like, and what a router makes of the events."""

    wire: Wire = Wire()
    framing: Framing = "4"
    filled_replay: bool = True
    """Whether an answer that is no journal has to be contiguous from the seq asked for. If not, it begins late, at the
    state's own seqs."""
    late_replay: bool = True
    """Whether an answer from 0 may begin late, at the state's own seqs. llm-d refuses such an answer and forgets the
    pod. Its requests from 0 may therefore get END alone."""
    clears: Clears = "rank"
    one_copy: bool = False
    """A block that several ranks hold is one to the router, and the first removal ends it. On a merged stream such a
    block is stored by the first rank that has it, and removed by the last."""
    one_group: bool = False
    """The router takes one group. The first one that carries prefixes leaves, without a number, and no other."""
    topics: Topics = "any"
    one_stream: str = ""
    """Why its routers cannot read several streams on one connection, as a sentence goes on; empty: they can."""
    max_events: int = 0
    """Events of the largest batch it takes; 0: any number."""
    max_bytes: int = 0
    """Bytes of the largest batch it takes; 0: any number."""

    @property
    def hashes_tokens(self) -> bool:
        """Whether the router hashes the tokens of each store itself. Without tokens it would be wrong, in silence."""
        return self.wire.strict

    @property
    def only_topic(self) -> str | None:
        """The one topic that a router of this family takes; None if it takes several."""
        return {"empty": "", "kv-events": "kv-events"}.get(self.topics)

    def without_tokens(self) -> Profile:
        """The same family, for an output that tells nothing of prompts."""
        return structs.replace(self, wire=structs.replace(self.wire, drop_tokens=True))

    @property
    def as_it_comes(self) -> bool:
        """Whether a router of this family takes the batches of a source as they come, once they are encoded."""
        return self.clears == "rank" and not (self.one_copy or self.one_group or self.max_events or self.max_bytes)


CANONICAL: Final = Wire()
"""Maps, with hashes and media as the engine named them."""

_STRICT: Final = Wire(strict=True)
_DYNAMO: Final = Wire("map", strict=True, fold_hashes=True, media=(("FS", "DISK"), ("OBJ", "EXTERNAL")))
_DYNAMO_PLANE: Final = Wire("map", strict=True, fold_hashes=True, drop_group=True)
"""What the driver of Dynamo's event plane makes its events of. They have no groups, and tiers instead of media."""
_MIB: Final = 1024 * 1024

PROFILES: Final[dict[str, Profile]] = {
    "vllm": Profile(CANONICAL, "4"),
    "dynamo": Profile(_DYNAMO, "4", filled_replay=False),
    "dynamo-plane": Profile(_DYNAMO_PLANE, "4", one_group=True),
    "llm-d": Profile(
        Wire(strict=True, fill_kinds=True, fold_pairs=True, drop_adapter_key=True),
        "4",
        late_replay=False,
        clears="pod",
        topics="pod and model",
    ),
    "llm-d-sglang": Profile(
        Wire("array", strict=True, fold_pairs=True, drop_adapter_key=True),
        "4",
        late_replay=False,
        clears="pod",
        topics="pod and model",
    ),
    "aibrix": Profile(
        Wire("array", strict=True, one_block=True),
        "4",
        filled_replay=False,
        clears="pod or nothing",
        one_copy=True,
        one_stream="know a worker by its connection, and need one for each",
    ),
    "sglang": Profile(_STRICT, "3"),
    "vllm-router": Profile(
        _STRICT,
        "4",
        filled_replay=False,
        topics="empty",
        one_stream="take batches without a topic alone",
        max_events=4096,
        max_bytes=16 * _MIB,
    ),
    "smg": Profile(
        _STRICT,
        "4",
        filled_replay=False,
        clears="pod",
        one_stream="keep one seq for each connection",
        max_bytes=4 * _MIB,
    ),
    "kthena": Profile(
        Wire("array", strict=True, fold_hashes=True, fold_pairs=True),
        "4",
        filled_replay=False,
        clears="pod",
        one_copy=True,
        one_group=True,
        topics="kv-events",
        one_stream="file all blocks under the pod that they run in, so each needs a connection of its own",
    ),
    "mooncake": Profile(Wire(strict=True, drop_group=True), "4", one_group=True),
}
"""By the name of ``outputs[].profile``. Where each rule comes from is in docs/decisions/profiles-of-routers.md."""


def encode(wire: Wire, events: Sequence[AnyEvent], ts: float, rank: int) -> bytes:
    """One batch: always an array of exactly three, ``[ts, events, rank]``."""
    events = [readable(event) if isinstance(event, dict) and is_store(event) else event for event in events]
    if wire is CANONICAL:
        return encode_batch(events, ts, rank)
    if wire.strict:
        events = [event for event in events if not _hash_only(event)]
    if wire.by_event:
        events = [each for event in events for each in _translated(wire, event)]
    return encode_batch(events, ts, rank) if wire.encoding == "map" else encode_positional_batch(events, ts, rank)


def _hash_only(event: AnyEvent) -> bool:
    """Whether an event is of blocks whose tokens are not known."""
    return isinstance(event, HashOnlyRemoved) or (is_store(event) and field(event, "token_ids") == NOTHING)


def fold(block: Hash) -> int:
    """A byte hash as the 64-bit integer vLLM would have sent for it (``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES``)."""
    return int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block


def _translated(wire: Wire, event: AnyEvent) -> list[AnyEvent]:
    """The event as this wire has it; the same object where nothing changes."""
    if isinstance(event, AllBlocksCleared):
        return [event]
    changes: dict[str, Any] = {}
    hashes = field(event, "block_hashes")
    if wire.fold_hashes and isinstance(hashes[0], bytes):
        changes["block_hashes"] = [fold(block) for block in hashes]
        parent = value(event, "parent_block_hash")
        if parent is not None:
            changes["parent_block_hash"] = fold(parent)
    for known, wanted in wire.media:
        if value(event, "medium") == known:
            changes["medium"] = wanted
    grouped = value(event, "group_idx") is not None
    if grouped and wire.drop_group:
        changes["group_idx"] = UNSET
    if grouped and wire.fill_kinds and is_store(event) and value(event, "kv_cache_spec_kind") is None:
        changes["kv_cache_spec_kind"] = "full_attention"
    event = changed(event, changes)
    if wire.drop_tokens:
        event = without_content(event)
    if wire.fold_pairs:
        event = first_of_pairs(event)
    if wire.drop_adapter_key:
        event = without_adapter_key(event)
    return block_by_block(event) if wire.one_block else [event]
