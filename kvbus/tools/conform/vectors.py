"""The test vectors of docs/spec.

A vector has the frames that a publisher sends, and the blocks that a correct reader then holds.

A program in any language can run the vectors without a socket. It needs a MessagePack decoder and the files of the
vectors.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvbus.core.wire.frames import END_SEQ

END: Final = [b"", b"", END_SEQ, b""]

Frames = list[bytes]
Block = tuple[int | None, str, int | bytes]
"""The identity of a block: KV-cache group, medium and hash.

The medium is in upper case. It is ``GPU`` for every name of the device.
"""


def stored(*hashes: Any, parent: Any = None, size: int = 2, **fields: Any) -> dict[str, Any]:
    """Return a BlockStored event as vLLM sends it. The tokens of the blocks are derived from their hashes."""
    numbers = [each if isinstance(each, int) else each[0] for each in hashes]
    tokens = [number % 1000 * 10 + at for number in numbers for at in range(size)]
    event = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": size, "lora_id": None, "medium": "GPU", "lora_name": None} | fields


def removed(*hashes: Any, medium: str | None = "GPU", **fields: Any) -> dict[str, Any]:
    """Return a BlockRemoved event as vLLM sends it."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium} | fields


CLEARED: Final = {"type": "AllBlocksCleared"}


def pack(value: Any) -> bytes:
    """Encode a value as msgpack, to be the payload of a message."""
    return msgspec.msgpack.encode(value)


def message(seq: int, *events: Any, rank: Any = 0, topic: bytes = b"") -> Frames:
    """Return the frames of a batch as a SUB socket receives them."""
    return [topic, seq.to_bytes(8, "big"), pack([1.5, list(events), rank])]


def raw(seq: int, payload: bytes) -> Frames:
    """Return the frames of a message whose payload is any bytes, not necessarily a batch."""
    return [b"", seq.to_bytes(8, "big"), payload]


def answer(*messages: Frames) -> list[Frames]:
    """Return the messages of a replay answer: the given messages, and then END."""
    return [*([b"", *each] for each in messages), END]


class Vector(msgspec.Struct, frozen=True):
    """The messages of a publisher, and the blocks that a reader must hold after them.

    Attributes:
        clauses: numbers of the clauses that the vector tests.
        title: description of the messages.
        live: messages as a SUB socket receives them.
        view: the live blocks after the last message of ``live`` and, if there is one, the answer ``replay``.
        replay_from: highest seq at which a correct replay request may begin; None if no batch is missing.
        replay: messages that a DEALER socket receives after ``live``, as the answer to a replay request from seq 0.
    """

    clauses: list[str]
    title: str
    live: list[Frames]
    view: list[Block]
    replay_from: int | None = None
    replay: list[Frames] = []


def gpu(*hashes: Any, group: int | None = None) -> list[Block]:
    """Return the identities of blocks with these hashes on the device."""
    return [(group, "GPU", each) for each in hashes]


BIG: Final = 2**64 - 5
BYTES: Final = bytes(range(1, 33))
ONE: Final = message(0, stored(1))

VECTORS: Final[dict[str, Vector]] = {
    "stores": Vector(["6.4"], "A chain of two blocks, and a third block after them",
                     [message(0, stored(1, 2)), message(1, stored(3, parent=2))], gpu(1, 2, 3)),
    "empty-batch": Vector(["3.6"], "A batch without events has a number and changes no block",
                          [ONE, message(1), message(2, stored(2, parent=1))], gpu(1, 2)),
    "topic": Vector(["2.3"], "A topic is not part of the payload",
                    [message(0, stored(1), topic=b"kv@10.0.0.7:8000@m")], gpu(1)),
    "publisher-id": Vector(["2.2"], "A sequence frame of 24 bytes: the number and the publisher's id",
                           [[b"", bytes(8) + bytes(16), ONE[2]]], gpu(1)),
    "two-frames": Vector(["2.1"], "A message of two frames is not a batch", [ONE[:2], ONE], gpu(1)),
    "four-frames": Vector(["2.1"], "A message of four frames is not a batch", [[*ONE, b""], ONE], gpu(1)),
    "short-sequence": Vector(["2.2"], "A sequence frame of four bytes is not a number",
                             [[b"", bytes(4), ONE[2]], ONE], gpu(1)),
    "number-too-large": Vector(["2.2"], "A number of 2^63 is not valid",
                               [ONE, [b"", (2**63).to_bytes(8, "big"), pack([1.5, [stored(9)], 0])],
                                message(1, stored(2, parent=1))], gpu(1, 2)),
    "duplicate-number": Vector(["3.5"], "A batch that was applied is not applied again",
                               [ONE, message(1, removed(1)), ONE], []),
    "gap": Vector(["3.4", "4.1", "4.2"], "A missing batch is requested, and the replay has it",
                  [ONE, message(2, stored(3, parent=2))], gpu(1, 2, 3), replay_from=1,
                  replay=answer(ONE, message(1, stored(2, parent=1)), message(2, stored(3, parent=2)))),
    "gap-old-framing": Vector(["4.2"], "A replay answer of vLLM before 0.26 has no topic frame",
                              [ONE, message(2, stored(3, parent=2))], gpu(1, 2, 3), replay_from=1,
                              replay=[[b"", *ONE[1:]], [b"", *message(1, stored(2, parent=1))[1:]],
                                      [b"", *message(2, stored(3, parent=2))[1:]], [b"", END_SEQ, b""]]),
    "no-rank": Vector(["6.1"], "The rank may be null", [message(0, stored(1), rank=None)], gpu(1)),
    "not-msgpack": Vector(["6.13", "12.2"], "Only the payload that is not MessagePack is lost",
                          [ONE, raw(1, b"\xc1nothing"), message(2, stored(2, parent=1))], gpu(1, 2)),
    "no-batch": Vector(["6.1", "6.13"], "Only the payload that is not a batch is lost",
                       [ONE, raw(1, pack("batch")), message(2, stored(2, parent=1))], gpu(1, 2)),
    "arrays": Vector(["6.2"], "Events as arrays: vLLM 0.23 and before, SGLang 0.5.19 and before",
                     [message(0, ["BlockStored", [1, 2], None, [10, 11, 20, 21], 2, None, "GPU"]),
                      message(1, ["BlockRemoved", [2], "GPU"])], gpu(1)),
    "nulls-left-out": Vector(["6.3"], "A missing key means null, as in SGLang's maps",
                             [message(0, {"type": "BlockStored", "block_hashes": [1], "token_ids": [10, 11],
                                          "block_size": 2})], gpu(1)),
    "parent-left-out": Vector(["6.3", "6.11"], "A block with an unknown parent is not lost",
                              [message(0, stored(2, parent=1))], gpu(2)),
    "too-few-tokens": Vector(["6.5", "6.13"], "An event with too few tokens is lost, but not its batch",
                             [message(0, stored(1), stored(7, 8, token_ids=[1, 2, 3]), stored(2, parent=1))],
                             gpu(1, 2)),
    "unsigned-hash": Vector(["6.6"], "A hash of 64 bits, unsigned",
                            [message(0, stored(BIG)), message(1, removed(BIG))], []),
    "signed-hash": Vector(["6.6"], "A negative hash", [message(0, stored(-5), stored(-6, parent=-5))], gpu(-5, -6)),
    "bytes-hash": Vector(["6.6"], "A hash of 32 bytes", [message(0, stored(BYTES))], gpu(BYTES)),
    "token-out-of-range": Vector(["6.9", "6.13"], "An event with a negative token id is lost",
                                 [message(0, stored(7, token_ids=[-1, 2]), stored(1))], gpu(1)),
    "pairs": Vector(["6.9"], "Pairs of tokens (EAGLE): the block size counts pairs",
                    [message(0, stored(1, token_ids=[[1, 2], [2, 3]]))], gpu(1)),
    "order-in-a-batch": Vector(["6.10"], "Stored, removed and stored again in one batch",
                               [message(0, stored(1), removed(1), stored(1), stored(2, parent=1), removed(2))],
                               gpu(1)),
    "children-stay": Vector(["6.12"], "The children of a removed block stay live",
                            [message(0, stored(1, 2, 3)), message(1, removed(1)), message(2, stored(4, parent=3))],
                            gpu(2, 3, 4)),
    "one-bad-event": Vector(["6.13"], "Only the event without hashes is lost",
                            [message(0, stored(1), {"type": "BlockStored", "token_ids": [1], "block_size": 1},
                                     stored(2, parent=1))], gpu(1, 2)),
    "copies": Vector(["7.2"], "Counted copies: after the first of two removals, the block is live",
                     [message(0, stored(1)), message(1, stored(1)), message(2, removed(1))], gpu(1)),
    "copies-gone": Vector(["7.2"], "Counted copies: after the last removal, the block is not live",
                          [message(0, stored(1), stored(1)), message(1, removed(1)), message(2, removed(1))], []),
    "groups": Vector(["8.1"], "One hash in two groups: a removal is about its own group",
                     [message(0, stored(1, group_idx=0, kv_cache_spec_kind="full_attention"),
                              stored(1, group_idx=1, kv_cache_spec_kind="full_attention")),
                      message(1, removed(1, group_idx=1))], gpu(1, group=0)),
    "media": Vector(["9.1", "9.2"], "A block on the device and on the host: a removal is about its own medium",
                    [message(0, stored(1), stored(1, medium="CPU")), message(1, removed(1))], [(None, "CPU", 1)]),
    "medium-any-case": Vector(["9.1"], "Names of media in any case; null is the device",
                              [message(0, stored(1, medium=None), stored(2, parent=1, medium="gpu"),
                                       stored(1, medium="disk"))],
                              [*gpu(1, 2), (None, "DISK", 1)]),
    "clear": Vector(["11.1", "11.4"], "AllBlocksCleared removes all earlier blocks",
                    [message(0, stored(1, 2)), message(1, CLEARED), message(2, stored(3))], gpu(3)),
    "unknown-event": Vector(["13.1"], "An event of an unknown type is skipped",
                            [message(0, {"type": "BlockDreamt", "block_hashes": [1]}, stored(1))], gpu(1)),
    "unknown-field": Vector(["13.1"], "An unknown key is skipped",
                            [message(0, stored(1, dreamt={"of": [1]}), removed(9, dreamt=None))], gpu(1)),
    "longer-array": Vector(["13.1"], "Elements after the last known element are skipped",
                           [message(0, ["BlockStored", [1], None, [10, 11], 2, None, "GPU", None, None, None, None,
                                        None, "dreamt"])], gpu(1)),
}  # fmt: skip
"""All vectors, by the name of the vector's file."""
