"""sgl-router's index of one worker, by the rules of sglang#34407 (version 1): a snapshot, its barrier, and what follows."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
import zmq

from tests.doubles.payloads import unpack

EPOCH: Final = b"\0sgl-kv-epoch="
BARRIER: Final = b"\0sgl-kv-snapshot="
BUFFERED: Final = 4096
"""Batches that it keeps while it waits for a barrier."""

PATIENCE: Final = 1.0
"""Seconds after which it asks anew if the barrier does not come; sgl-router waits for eight."""

RECORDS: Final = 8192
"""Records of the largest chunk that it takes."""


class SglRouter:
    """A SUB, and a DEALER of its own for each snapshot. It knows no tiers: a hash is held or it is not.

    Args:
        endpoint: the live stream.
        snapshots: the snapshot endpoint.
        topic: what it subscribes to.
        rank: whose blocks it expects.
    """

    def __init__(self, endpoint: str, snapshots: str, topic: bytes = b"", rank: int = 0) -> None:
        self._context = zmq.Context()
        self._endpoint, self._snapshots, self._topic, self._rank = endpoint, snapshots, topic, rank
        self.epoch = b""
        """Of the blocks that it has; empty while it has none that it relies on."""
        self.blocks: dict[int, int | None] = {}
        self.why: list[str] = []
        """Why it began anew, each time."""
        self._next = 0
        self._buffered: list[tuple[bytes, int, bytes, list[Any]]] = []
        self._asked: zmq.Socket[bytes] | None = None
        self._asked_at = 0.0
        self._messages: list[list[bytes]] = []
        self.connect()

    def connect(self) -> None:
        """Subscribe; what is published from now on may come."""
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._live.connect(self._endpoint)

    def disconnect(self) -> None:
        """Lose the connection."""
        self._live.close(0)

    def close(self) -> None:
        self.disconnect()
        self._hang_up()
        self._context.term()

    def _hang_up(self) -> None:
        if self._asked is not None:
            self._asked.close(0)
        self._asked, self._messages = None, []

    def read(self) -> bool:
        """Take in what is there; whether what it has can be relied on."""
        while self._live.poll(0):
            topic, seq, payload = self._live.recv_multipart()
            assert len(seq) == 8
            mark, _, barrier = topic.partition(EPOCH)[2].partition(BARRIER)
            assert mark, f"{topic!r} names no epoch"
            self._take(mark, int.from_bytes(seq, "big"), barrier, unpack(payload)[1])
        if not self.epoch:
            self._synchronize()
        return bool(self.epoch)

    def _take(self, epoch: bytes, seq: int, barrier: bytes, events: list[Any]) -> None:
        if not self.epoch:
            self._buffered.append((epoch, seq, barrier, events))
            assert len(self._buffered) <= BUFFERED
        elif epoch == self.epoch and seq == self._next:
            self._apply(events)
            self._next += 1
        elif epoch != self.epoch or seq > self._next:
            self.why.append(f"{self.epoch!r} {self._next}, and then {epoch!r} {seq}")
            self.epoch, self.blocks = b"", {}
            self._hang_up()
            self._buffered = [(epoch, seq, barrier, events)]

    def _apply(self, events: list[Any]) -> None:
        for event in events:
            if event["type"] == "BlockStored":
                self._insert(event["parent_block_hash"], event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    self.blocks.pop(block, None)
            else:
                self.blocks.clear()

    def _insert(self, parent: int | None, hashes: list[int]) -> None:
        for block in hashes:
            self.blocks[block], parent = parent, block

    def _synchronize(self) -> None:
        if self._asked is None:
            self._asked = self._context.socket(zmq.DEALER)
            self._asked.connect(self._snapshots)
            self._asked.send_multipart([b"", b"snapshot-v1"])
            self._asked_at = time.monotonic()
        while self._asked.poll(0):
            self._messages.append(self._asked.recv_multipart())
        if not self._messages or self._messages[-1][1] != b"end":
            assert all(message[1] != b"error" for message in self._messages), self._messages
            return
        header, chunks = self._checked()
        _, epoch, _, resume, seq, barrier_id, _ = header
        known = [each for each in self._buffered if each[0] == epoch.encode() and each[1] >= seq]
        barriers = [each for each in known if each[1:3] == (seq, barrier_id.encode())]
        if not barriers:  # it is still on its way, or was there before the subscription
            if time.monotonic() - self._asked_at > PATIENCE:
                self._hang_up()
            return
        assert len(barriers) == 1
        assert barriers[0][3] == []
        assert [each[1] for each in known] == list(range(seq, seq + len(known)))
        self.blocks = {}
        for parent, hashes in chunks:
            self._insert(parent, hashes)
        for _, _, _, events in known[1:]:
            self._apply(events)
        self.epoch, self._next, self._buffered = epoch.encode(), resume + len(known) - 1, []
        self._hang_up()

    def _checked(self) -> tuple[list[Any], list[Any]]:
        """The header and the records, if they are what its decoder takes."""
        assert all(len(message) == 3 and message[0] == b"" for message in self._messages)
        (_, kind, head), *chunks, (_, _, rest) = self._messages
        header = unpack(head)
        version, epoch, rank, resume, seq, barrier_id, count = header
        assert (kind, rest, version, rank, resume) == (b"header", b"", 1, self._rank, seq + 1)
        assert seq >= 0
        assert 0 < len(epoch) <= 256
        assert 0 < len(barrier_id) <= 256
        records: list[Any] = []
        for _, chunk_kind, payload in chunks:
            assert chunk_kind == b"chunk"
            found = msgspec.msgpack.decode(payload, type=list[tuple[int | None, list[int]]])
            assert len(found) <= RECORDS
            assert all(hashes for _, hashes in found)
            records += found
        assert len(records) == count
        return header, records
