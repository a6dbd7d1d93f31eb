"""The profiles: how each family of routers interprets events, and how batches are encoded for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, structs

from kvbus.core.types import Hash, Residencies
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

Clears = Literal["rank", "connection", "pod", "pod or nothing"]
"""The blocks that routers of a family drop when they read an AllBlocksCleared.

``rank``: the blocks of the batch's rank. ``connection``: the blocks of all ranks on the connection. ``pod``: the blocks
of all ranks of the pod. ``pod or nothing``: some versions drop the blocks of the pod, and other versions ignore the
event.
"""

Topics = Literal["any", "pod and model", "empty", "kv-events"]
"""The topics under which routers of a family accept batches.

``any``: every topic. ``pod and model``: topics of the form ``kv@POD@MODEL``. ``empty``: only the empty topic.
``kv-events``: only the topic with this name.
"""


class Wire(msgspec.Struct, frozen=True, cache_hash=True):
    """The encoding of batches for a family of routers.

    If the wires of several outputs are equal, kvbus encodes each batch once for all of them.
    """

    encoding: Encoding = "map"
    fold_hashes: bool = False
    """Whether a hash of bytes is sent as an unsigned 64-bit integer, made of its last eight bytes.

    vLLM uses the same rule when it is configured to send integer hashes.
    """
    media: tuple[tuple[str, str], ...] = ()
    """Replaced names of media. Each pair has a name that the routers do not know, and their name for the same tier."""
    one_block: bool = False
    """Whether each store has only one block, for routers that use a store's parent as the parent of all its blocks."""
    fill_kinds: bool = False
    """Whether stores that name a group but no kind get the kind ``full_attention``.

    The routers of this family drop a store that names a group but no kind. vLLM 0.20 and 0.21 name no kind. The filled
    kind is right for prefixes, because the normalizer has already left out the groups whose blocks are not in prefixes.
    """
    fold_pairs: bool = False
    """Whether single tokens are sent for an engine with EAGLE, for routers that cannot read pairs of tokens.

    Such an engine names a pair ``[a, b]`` in place of each token. Only ``a`` is sent.
    """
    drop_adapter_key: bool = False
    """Whether extra keys are sent without the adapter's name, for routers that treat every text in them as an image."""
    drop_group: bool = False
    """Whether events are sent without the number of their KV-cache group. See :attr:`Profile.one_group`."""
    strict: bool = False
    """Whether blocks with unknown tokens are left out, because the routers compute hashes from the tokens of each
    store.
    """
    drop_tokens: bool = False
    """Whether stores are sent without token ids and other fields that reveal the content or the sender of a prompt."""

    @property
    def by_event(self) -> bool:
        """Whether events have to be translated one by one before a batch is encoded for this family of routers.

        If not, kvbus encodes the batch without changing its events.
        """
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
    """A family of routers: the encoding of batches for it, its form of replay answers, and how it interprets events."""

    wire: Wire = Wire()
    framing: Framing = "4"
    filled_replay: bool = True
    """Whether a replay answer that contains a state must have every seq from the requested one on.

    If it is True, kvbus adds empty batches after the state. If it is False, the state has its own seqs, and the answer
    begins later than requested.
    """
    late_replay: bool = True
    """Whether the answer to a replay request from seq 0 may begin at a later seq, with a state that has its own seqs.

    llm-d rejects such an answer and forgets the pod's blocks. Therefore kvbus may answer its requests from 0 only with
    END.
    """
    clears: Clears = "rank"
    one_copy: bool = False
    """Whether the router counts a block that several ranks hold as one block, and drops it at the first removal.

    On a merged stream, kvbus sends such a block's store from the first rank that holds it, and its removal from the
    last.
    """
    one_rank: bool = False
    """Whether the router expects consecutive seqs in each rank.

    A merged stream numbers the batches of all ranks together. For such a router, all its batches name rank 0.
    """
    one_group: bool = False
    """Whether the router accepts the blocks of only one KV-cache group of each engine.

    kvbus sends it only the first group whose blocks form prefixes, and leaves out the number of the group.
    """
    residencies: Residencies = "named"
    """How the router distinguishes the residencies of a block on one medium.

    They have different localities or owners. A router that knows these fields gets each residency under its own names.
    """
    topics: Topics = "any"
    one_stream: str = ""
    """The reason why the router cannot read several streams on one connection, as the end of a sentence.

    It is empty if the router can read several streams.
    """
    short_seqs: bool = False
    """Whether the router drops a batch whose sequence frame has 24 bytes: the seq and then a publisher id."""
    max_events: int = 0
    """Maximum number of events in a batch that the router accepts; 0 if there is no maximum."""
    max_bytes: int = 0
    """Maximum size in bytes of a batch that the router accepts; 0 if there is no maximum."""
    reads_arrays: bool = False
    """Whether a router that gets events as maps could also decode them as arrays.

    Then it does not need maps (``_NEEDS``).
    """

    @property
    def hashes_tokens(self) -> bool:
        """Whether the router computes hashes from the tokens of each store.

        If kvbus sent it a store without tokens, the router would compute wrong hashes.
        """
        return self.wire.strict

    @property
    def only_topic(self) -> str | None:
        """The single topic that a router of this family accepts; None if it accepts more than one topic."""
        return {"empty": "", "kv-events": "kv-events"}.get(self.topics)

    def without_tokens(self) -> Profile:
        """Return this profile with an encoding that reveals nothing about the content of prompts."""
        return structs.replace(self, wire=structs.replace(self.wire, drop_tokens=True))

    @property
    def as_it_comes(self) -> bool:
        """Whether routers of this family can get each batch of a source unchanged, as exactly one batch.

        For other families, :mod:`kvbus.core.outputs.fitting` replaces clears, leaves events out or divides batches.
        """
        return self.clears == "rank" and not (self.one_copy or self.one_group or self.max_events or self.max_bytes)


CANONICAL: Final = Wire()
"""The encoding that sends events as maps, with hashes and media as the engine named them."""

_STRICT: Final = Wire(strict=True)
_DYNAMO: Final = Wire("map", strict=True, fold_hashes=True, media=(("FS", "DISK"), ("OBJ", "EXTERNAL")))
_DYNAMO_PLANE: Final = Wire("map", strict=True, fold_hashes=True, drop_group=True)
"""The encoding of the output to Dynamo's event plane.

That output decodes the batches and builds Dynamo's events from them, with tiers and without groups.
"""
_MIB: Final = 1024 * 1024

PROFILES: Final[dict[str, Profile]] = {
    "vllm": Profile(CANONICAL),
    "dynamo": Profile(_DYNAMO, residencies="worker", reads_arrays=True, filled_replay=False, short_seqs=True),
    "dynamo-plane": Profile(_DYNAMO_PLANE, residencies="worker", one_group=True),
    "llm-d": Profile(
        Wire(strict=True, fill_kinds=True, fold_pairs=True, drop_adapter_key=True),
        reads_arrays=True,
        late_replay=False,
        clears="pod",
        topics="pod and model",
        residencies="one",
    ),
    "llm-d-sglang": Profile(
        Wire("array", strict=True, fold_pairs=True, drop_adapter_key=True),
        late_replay=False,
        clears="pod",
        topics="pod and model",
        residencies="one",
    ),
    "aibrix": Profile(
        Wire("array", strict=True, one_block=True),
        filled_replay=False,
        clears="pod or nothing",
        one_copy=True,
        one_stream="identify a worker by its connection, so each worker needs its own connection",
        short_seqs=True,
        residencies="one",
    ),
    "sglang": Profile(_STRICT, framing="3", residencies="one"),
    "vllm-router": Profile(
        _STRICT,
        filled_replay=False,
        topics="empty",
        one_stream="accept only batches without a topic",
        max_events=4096,
        max_bytes=16 * _MIB,
        residencies="one",
    ),
    "smg": Profile(
        _STRICT,
        reads_arrays=True,
        filled_replay=False,
        clears="connection",
        one_copy=True,
        one_rank=True,
        one_stream="keep one seq for each connection",
        short_seqs=True,
        max_bytes=4 * _MIB,
        residencies="one",
    ),
    "kthena": Profile(
        Wire("array", strict=True, fold_hashes=True, fold_pairs=True),
        filled_replay=False,
        clears="pod",
        one_copy=True,
        one_group=True,
        topics="kv-events",
        one_stream="assign all blocks to the pod that they run in, so each pod needs its own connection",
        residencies="one",
    ),
    "mooncake": Profile(Wire(strict=True, drop_group=True), one_group=True, residencies="one"),
}
"""The profiles, by the name in the setting ``outputs[].profile``.

docs/decisions/profiles-of-routers.md names the source of each rule.
"""

_NEEDS: Final[tuple[tuple[str, Callable[[Profile], bool]], ...]] = (
    ("events as maps", lambda of: of.wire.encoding == "map" and not of.reads_arrays),
    ("events as arrays", lambda of: of.wire.encoding == "array"),
    ("replay messages of three frames", lambda of: of.framing == "3"),
    ("only stores with token ids", lambda of: of.wire.strict and not of.wire.drop_tokens),
    ("byte hashes as integers", lambda of: of.wire.fold_hashes),
    ("`DISK` for `FS` and `EXTERNAL` for `OBJ`", lambda of: bool(of.wire.media)),
    ("one block per store", lambda of: of.wire.one_block),
    ("only one group of blocks", lambda of: of.one_group),
    ("no number of the group", lambda of: of.wire.drop_group),
    ("a kind for each group", lambda of: of.wire.fill_kinds),
    ("single tokens in place of EAGLE's pairs", lambda of: of.wire.fold_pairs),
    ("extra keys without the adapter's name", lambda of: of.wire.drop_adapter_key),
    ("one removal for a block of several ranks", lambda of: of.one_copy),
    ("only rank 0 on a merged stream", lambda of: of.one_rank),
    ("removals in place of a clear of one rank", lambda of: of.clears != "rank"),
    ("no topic", lambda of: of.topics == "empty"),
    ("the topic kv-events", lambda of: of.topics == "kv-events"),
    ("topics of the form kv@POD@MODEL", lambda of: of.topics == "pod and model"),
)
"""The needs that routers may have.

Each is a text for people, and a function that returns whether a profile has the need.
"""


def needs(router: Profile, sent: Profile | None = None) -> list[str]:
    """Return what the routers of a profile need in order to interpret events correctly, as texts for people.

    Args:
        router: the profile of the routers.
        sent: the profile of the output that the routers read. Needs that this output meets are left out. If it is None,
            all needs are returned.
    """
    found = [text for text, needed in _NEEDS if needed(router) and not (sent is not None and needed(sent))]
    for limit, most, unit in (
        (router.max_events, 0 if sent is None else sent.max_events, "events"),
        (router.max_bytes, 0 if sent is None else sent.max_bytes, "bytes"),
    ):
        if limit and not 0 < most <= limit:
            found.append(f"at most {limit:,} {unit} in a batch")
    return found


def encode(wire: Wire, events: Sequence[AnyEvent], ts: float, rank: int) -> bytes:
    """Encode one batch for a family of routers.

    The result is always an array of three items: ``[ts, events, rank]``.
    """
    if dict in set(map(type, events)):  # only a store is a map, and only if no struct has all its fields
        events = [readable(event) if isinstance(event, dict) and is_store(event) else event for event in events]
    if wire is CANONICAL:
        return encode_batch(events, ts, rank)
    if wire.strict:
        events = [event for event in events if not _hash_only(event)]
    if wire.by_event:
        events = [each for event in events for each in _translated(wire, event)]
    return encode_batch(events, ts, rank) if wire.encoding == "map" else encode_positional_batch(events, ts, rank)


def _hash_only(event: AnyEvent) -> bool:
    """Return whether an event is about blocks whose tokens are unknown."""
    return isinstance(event, HashOnlyRemoved) or (is_store(event) and field(event, "token_ids") == NOTHING)


def fold(block: Hash) -> int:
    """Return the 64-bit integer that stands for a byte hash. An integer hash is returned unchanged.

    vLLM sends the same integer if ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`` is set.
    """
    return int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block


def _translated(wire: Wire, event: AnyEvent) -> list[AnyEvent]:
    """Translate an event into the encoding ``wire`` of one family of routers.

    Return the resulting events; if nothing changes, the event itself.
    """
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
