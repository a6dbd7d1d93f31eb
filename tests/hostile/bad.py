"""Bad input by name: messages that a broken, old or hostile publisher may send to kvbus.

Each message has the reasons for which kvbus must refuse it and count it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbus.core.types import Filtered, Reason
from tests.doubles.payloads import pack, payload, removed, store

HEAD = b"\x93\xcb" + bytes(8)
"""The first bytes of an encoded batch: the head of an array with three elements, and the batch's ``ts``."""
DEEP = 1_000_000
"""A number of nested levels in an event that is more than Python can decode.

Python up to 3.13 limits the levels, and 3.14 the bytes of its stack.
"""


@dataclass(frozen=True)
class Bad:
    """A bad payload, and how often kvbus must count each reason for it."""

    name: str
    payload: bytes
    counted: dict[str, int]


def one_event(name: str, event: Any, counted: Reason | Filtered | None) -> Bad:
    """Return a batch with a bad event between two good events."""
    good = (store([901]), removed([901]))
    return Bad(name, payload(good[0], event, good[1]), {} if counted is None else {str(counted): 1})


FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "group_idx")
WRONG: tuple[Any, ...] = (None, True, 1.5, -1, "text", b"bytes", [], [None], [[]], {}, {"a": 1}, 2**63, float("nan"))
RIGHT: dict[str, list[Any]] = {
    "block_hashes": [[]],
    "parent_block_hash": [None, -1, 2**63, b"bytes"],
    "token_ids": [[]],
    "block_size": [],
    "lora_id": [None],
    "medium": [None],
    "lora_name": [None, "text"],
    "group_idx": [None],
}
"""Values of :data:`WRONG` that are valid for a field, or for which kvbus refuses the event for another reason."""


def fields() -> list[tuple[str, Any, str]]:
    """Return every bad field of a store as a tuple: the field's name, a value of a wrong type, and the form of the
    store.

    The form is ``map`` or ``array``.
    """
    cases = []
    for field in FIELDS:
        for value in WRONG:
            fine = any(type(value) is type(ok) and value == ok for ok in RIGHT[field])
            if not fine:
                cases.append((field, value, "map"))
                if (field, type(value)) != ("lora_name", dict):  # in an array, this field may be a map
                    cases.append((field, value, "array"))
    return cases


def with_field(field: str, value: Any, form: str) -> Any:
    """Return a store event in which one field has a bad value. ``form`` is "map" or "array"."""
    event = store([902], lora_id=None, lora_name=None, group=None) | {"group_idx": 0}
    event[field] = value
    if form == "map":
        return event
    order = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    return ["BlockStored", *(event[name] for name in order), None, event["group_idx"]]


def without(field: str, form: str) -> Any:
    """Return a store without a field. If the store is an array, it also lacks all later fields."""
    event = store([902])
    if form == "map":
        return {name: value for name, value in event.items() if name != field}
    order = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
    return ["BlockStored", *(event[name] for name in order[: order.index(field)])]


BATCHES = [
    Bad("nothing", b"", {Reason.NOT_MSGPACK: 1}),
    Bad("cut short", payload(store([1]))[:-4], {Reason.NOT_MSGPACK: 1}),
    Bad("something behind it", payload(store([903])) + b"\x00", {Reason.NOT_MSGPACK: 1}),
    Bad("zeros", bytes(10_000), {Reason.BATCH_SHAPE: 1}),
    Bad("text", b"GET / HTTP/1.1\r\n\r\n", {Reason.BATCH_SHAPE: 1}),
    Bad("a type that msgpack does not have", b"\xc1", {Reason.NOT_MSGPACK: 1}),
    Bad("four thousand million events that are not there", HEAD + b"\xdd\xff\xff\xff\xff", {Reason.NOT_MSGPACK: 1}),
    Bad("a string as long", HEAD + b"\x91\xdb\xff\xff\xff\xff", {Reason.NOT_MSGPACK: 1}),
    Bad("a map as long", HEAD + b"\x91\xdf\xff\xff\xff\xff", {Reason.NOT_MSGPACK: 1}),
    Bad("a number", pack(7), {Reason.BATCH_SHAPE: 1}),
    Bad("null", pack(None), {Reason.BATCH_SHAPE: 1}),
    Bad("a map of something else", pack({"hello": "world"}), {Reason.BATCH_SHAPE: 1}),
    Bad("no events", pack([1.0]), {Reason.BATCH_SHAPE: 1}),
    Bad("events that are no list", pack([1.0, 7, 0]), {Reason.BATCH_SHAPE: 1}),
    Bad("ts is text", pack(["now", [], 0]), {Reason.BATCH_SHAPE: 1}),
    Bad("ts is null", pack([None, [], 0]), {Reason.BATCH_SHAPE: 1}),
    Bad("ts is NaN", payload(store([904]), ts=float("nan")), {Reason.BATCH_SHAPE: 1}),
    Bad("ts is infinite", payload(store([904]), ts=float("-inf")), {Reason.BATCH_SHAPE: 1}),
    Bad("ts is negative", payload(ts=-1e300), {}),
    Bad("ts is huge", payload(ts=1e300), {}),
    Bad("the rank is text", payload(store([905]), rank="zero"), {Reason.BATCH_SHAPE: 1}),
    Bad("the rank is below zero", payload(store([905]), rank=-1), {Reason.BATCH_SHAPE: 1}),
    Bad("the rank is beyond 31 bits", payload(store([905]), rank=2**31), {Reason.BATCH_SHAPE: 1}),
    Bad("nested", HEAD + b"\x91" * DEEP + b"\x00\x00", {Reason.NESTING: 1}),
    Bad("nested maps", HEAD + b"\x91" + b"\x81\xa1a" * DEEP + b"\x00\x00", {Reason.NESTING: 1}),
    Bad(
        "nested in a field nobody knows",
        HEAD
        + b"\x91"
        + pack(store([906]))[:-1][:1].replace(b"\x86", b"\x87")
        + pack(store([906]))[1:]
        + b"\xa3new"
        + b"\x91" * DEEP
        + b"\x01"
        + b"\x00",
        {Reason.NESTING: 1},
    ),
    one_event("an event nobody knows", {"type": "BlockMoved", "block_hashes": [1]}, Reason.UNKNOWN_EVENT),
    one_event("an array nobody knows", ["BlockMoved", [1]], Reason.UNKNOWN_EVENT),
    one_event("no event at all", 7, Reason.WRONG_TYPE),
    one_event("an empty array", [], Reason.UNKNOWN_EVENT),
    one_event("an empty map", {}, Reason.UNKNOWN_EVENT),
    one_event("a block size of zero", store([907], block_size=0, tokens=list(range(16))), None),
    one_event("a block size below zero", store([908], block_size=-1, tokens=[1]), Reason.BLOCK_SIZE),
    one_event("a huge block size", store([909], block_size=2**31, tokens=[1]), Reason.TOKEN_COUNT),
    one_event("a block size beyond", store([909], block_size=2**31 + 1, tokens=[1]), Reason.BLOCK_SIZE),
    one_event("a token below zero", store([910], tokens=[-1] * 16), Reason.TOKEN_RANGE),
    one_event("a token that is too large", store([911], tokens=[2**32] * 16), Reason.TOKEN_RANGE),
    one_event("a token that is no integer", store([912], tokens=[0.5] * 16), Reason.WRONG_TYPE),
    one_event("too few tokens", store([913], tokens=[1] * 15), Reason.TOKEN_COUNT),
    one_event("no token for two blocks", store([914, 915], tokens=[1] * 17), Reason.TOKEN_COUNT),
    one_event("a hash beyond 64 bits", {**store([1]), "block_hashes": [b"x" * 65]}, Reason.HASH_KIND),
    one_event("a hash without a byte", {**store([1]), "block_hashes": [b""]}, Reason.HASH_KIND),
    one_event("hashes of two kinds", {**store([1, 2]), "block_hashes": [1, b"x"]}, Reason.HASH_KIND),
    one_event("one hash twice", store([916, 916]), Reason.DUPLICATE_HASH),
    one_event("its own parent", store([917], 917), Reason.SELF_PARENT),
    one_event("a medium nobody knows", store([918], medium="TAPE"), Reason.UNKNOWN_MEDIUM),
    one_event("a medium nobody knows, removed", removed([918], medium="TAPE"), Reason.UNKNOWN_MEDIUM),
    one_event("nothing to store", store([]), Filtered.NO_HASHES),
    one_event("nothing to remove", removed([]), Filtered.NO_HASHES),
    one_event("a group below zero", store([920], group=-1), Reason.INTEGER_RANGE),
    one_event("a group beyond 32 bits", removed([920], group=2**40), Reason.INTEGER_RANGE),
    one_event("a window below zero", store([920], kv_cache_spec_sliding_window=-5), Filtered.ODD_FIELD),
    one_event("an adapter below zero", store([920], lora_id=-1), Reason.INTEGER_RANGE),
    one_event("a block nobody knows, removed", removed([919]), Filtered.UNKNOWN_BLOCK),
]

FRAMES: list[tuple[str, list[bytes], str]] = [
    *((f"{count} frames", [b"x"] * count, Reason.FRAME_COUNT) for count in (0, 1, 2, 4, 5, 64, 50_000)),
    *(
        (f"a seq of {width} bytes", [b"", bytes(width), b"x"], Reason.SEQ_WIDTH)
        for width in (0, 1, 7, 9, 16, 23, 25, 4096)
    ),
    ("the seq that means END", [b"", b"\xff" * 8, payload(store([1]))], Reason.SEQ_RANGE),
    ("a seq below zero", [b"", b"\x80" + bytes(7), payload(store([1]))], Reason.SEQ_RANGE),
    ("a seq from nowhere", [b"", (2**63 - 1).to_bytes(8, "big"), payload(store([1]))], Reason.SEQ_RANGE),
]
