"""A router as a separate process: ``python -m tests.chaos.router JSON``, built on ``kvbus.client``.

JSON is a list of ``{name, endpoint, replay, snapshot, raw}``. The process answers each line on stdin by a line on
stdout: ``report`` by counters and a digest of each view, ``dump NAME`` by every key of a stream's view.

With ``raw``, a plain SUB socket reads the stream, too. It records seqs that go back, which a live stream must never
have.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import time
from collections import Counter
from typing import Any

import uvloop

from kvbus.client import BlockView, Lost, Received, Restarted, Snapshot, Subscriber, Synced
from kvbus.client.view import Block
from kvbus.transport.client.raw import RawSubscriber

Key = tuple[str, str, str]


def key_of(group: int | None, medium: str, block: Any) -> Key:
    """Return a block's group, medium and hash in a form that can be sorted and sent as JSON."""
    return (str(group), medium, block.hex() if isinstance(block, bytes) else str(block))


def digest(keys: Any) -> str:
    return hashlib.sha256(repr(sorted(keys)).encode()).hexdigest()[:24]


def tokens_digest(pairs: list[tuple[Key, Any]]) -> str:
    return digest((key, hashlib.sha256(repr(tokens).encode()).hexdigest()) for key, tokens in pairs)


class Following:
    """A stream, followed by the client library and, if ``raw`` is set, also by a plain SUB."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name = spec["name"]
        self._spec = spec
        self._view = BlockView()
        self._seq = -1
        self._counts: Counter[str] = Counter()
        self._lost: list[str] = []
        self._late = 0.0
        self._raw_seq = -1
        self._raw_count = 0
        self._raw_holes = 0
        self._went_back: list[str] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            if self._spec.get("raw"):
                tasks.create_task(self._watch())

    async def _follow(self) -> None:
        spec = self._spec
        async with Subscriber(spec["endpoint"], spec["replay"], snapshot_endpoint=spec.get("snapshot")) as subscriber:
            async for update in subscriber:
                self._view.update(update)
                self._counts[update.kind] += 1
                if isinstance(update, Received):
                    self._seq = update.seq
                    if update.batch.events and not update.replayed:
                        self._late = max(self._late, time.time() - update.batch.ts)
                elif isinstance(update, Snapshot | Synced):
                    self._seq = update.seq
                elif isinstance(update, Lost):
                    self._lost.append(f"{update.first}-{update.last} {update.reason}")
                elif isinstance(update, Restarted):
                    self._counts[f"restarted {update.reason}"] += 1

    async def _watch(self) -> None:
        async with RawSubscriber(self._spec["endpoint"]) as raw:
            async for frames in raw:
                seq = int.from_bytes(frames[1][:8], "big")
                if seq <= self._raw_seq:
                    self._went_back.append(f"{seq} after {self._raw_seq}")
                elif self._raw_seq >= 0:
                    self._raw_holes += seq - self._raw_seq - 1
                self._raw_seq = max(self._raw_seq, seq)
                self._raw_count += 1

    def _by_rank(self) -> dict[str, list[Block]]:
        ranks: dict[str, list[Block]] = {}
        for block in self._view:
            ranks.setdefault(str(block.rank), []).append(block)
        return ranks

    def report(self) -> dict[str, Any]:
        views = {}
        for rank, blocks in self._by_rank().items():
            keys = [(key_of(block.group_idx, block.medium, block.hash), block.token_ids) for block in blocks]
            views[rank] = {"blocks": len(keys), "keys": digest(key for key, _ in keys), "tokens": tokens_digest(keys)}
        late, self._late = self._late, 0.0
        lost, self._lost = self._lost, []
        return {
            "seq": self._seq,
            "views": views,
            "late": late,
            "lost": lost,
            "counts": dict(self._counts),
            "raw": {
                "on": bool(self._spec.get("raw")),
                "seq": self._raw_seq,
                "count": self._raw_count,
                "holes": self._raw_holes,
                "back": self._went_back,
            },
        }

    def dump(self) -> dict[str, list[Key]]:
        return {
            rank: [key_of(block.group_idx, block.medium, block.hash) for block in blocks]
            for rank, blocks in self._by_rank().items()
        }


async def serve(following: list[Following]) -> None:
    """Answer the requests of the chaos test, which are lines on stdin, until stdin ends."""
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode():
        word, _, name = line.strip().partition(" ")
        if word == "report":
            answer: Any = {stream.name: stream.report() for stream in following}
        else:
            answer = next(stream for stream in following if stream.name == name).dump()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


async def main() -> None:
    following = [Following(spec) for spec in json.loads(sys.argv[1])]
    tasks = [asyncio.ensure_future(stream.run()) for stream in following]
    served = asyncio.ensure_future(serve(following))
    await asyncio.wait([*tasks, served], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
