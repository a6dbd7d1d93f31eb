"""Helpers of the interop tests: captures with the engine's true blocks, free ports, and subprocesses.

Marker blocks, which the tests publish after a capture, show how far a router has read.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import msgspec

from kvbus.config import load
from tests.doubles.bus import wait_for
from tests.doubles.kvbus_process import KvbusProcess
from tests.ports import free_port
from tests.state.left import reserve, without_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvbus.transport.engine.publisher import EnginePublisher

    class Engine(Protocol):
        """What kvbus has to know of an engine."""

        @property
        def endpoint(self) -> str: ...

        @property
        def replay_endpoint(self) -> str | None: ...


DATA: Final = Path(__file__).parent.parent / "wire" / "data"
PREFIX_KINDS: Final = {None, "full_attention", "mla_attention", "sink_full_attention"}
SENTINEL: Final = 0x5E47_1E10_0000_0000
"""The first hash of marker blocks, which tests publish to see how far a router has read.

No capture has a hash near it.
"""


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a process, and SIGKILL if it has not ended after 60 seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def wait_for_subscribers(engine: EnginePublisher, count: int) -> None:
    """Wait until `count` SUB sockets have subscribed since the engine's last restart."""
    asyncio.run(engine.wait_for_subscriber(60, count=count))


@dataclass(frozen=True)
class Sentinel:
    """A batch with one root block that no capture contains, as a marker in a stream.

    Once an index finds the block's tokens, it has applied every batch published before.
    """

    tokens: list[int]
    payload: bytes

    @classmethod
    def make(cls, number: int, block_size: int, *, hashes: type = int) -> Self:
        """Return the marker batch with this number. `hashes` is the type of the hashes in the stream.

        Dynamo reads no hashes of type bytes, and kvbus reads no stream with both types.
        """
        block_hash = SENTINEL + number
        tokens = [4_000_000_000 + number] * block_size
        event = {
            "type": "BlockStored",
            "block_hashes": [block_hash if hashes is int else block_hash.to_bytes(32, "big")],
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        return cls(tokens, msgspec.msgpack.encode([time.time(), [event], 0]))


def is_sentinel(block_hash: int) -> bool:
    """Return whether a hash belongs to a marker block (see `Sentinel`).

    This works only for an index that keeps the hashes of the stream.
    """
    return SENTINEL <= block_hash < SENTINEL + 1000


@dataclass(frozen=True)
class TrueBlock:
    """One block that the engine had in its cache at the end of a recording, by its own account."""

    hash: int | str | None
    medium: str | None
    path: tuple[int, ...]
    """The tokens of the prompt up to the end of this block. Empty if the block has an integer hash."""


@dataclass(frozen=True)
class Capture:
    """Recorded traffic of an engine: one list of payloads for each epoch, and the blocks that it had at the end."""

    name: str
    topic: bytes
    lives: list[list[tuple[int, bytes]]]
    block_size: int
    truth: list[TrueBlock]

    @property
    def by_hash(self) -> bool:
        """Whether an index can be compared with the capture by hash, because all hashes of the capture are integers.

        Otherwise kvbus derives other hashes for the index, so the index must be compared by tokens.
        """
        return all(isinstance(block.hash, int) for block in self.truth)

    @property
    def hashes(self) -> type:
        """The Python type of the hashes in the capture's stream."""
        return bytes if isinstance(self.truth[0].hash, str) else int

    @classmethod
    def load(cls, name: str) -> Self:
        lives: list[list[tuple[int, bytes]]] = []
        topic = b""
        with (DATA / f"{name}.jsonl").open() as lines:
            for line in lines:
                record = json.loads(line)
                topic = base64.b64decode(record["topic"])
                if not lives or record["seq"] <= lives[-1][-1][0]:
                    lives.append([])
                lives[-1].append((record["seq"], base64.b64decode(record["payload"])))
        truth = json.loads((DATA / f"{name}.truth.json").read_text())["blocks"]
        blocks = [block for block in truth if block.get("kind") is None or block["kind"] in PREFIX_KINDS]
        paths = _paths(blocks)
        return cls(
            name,
            topic,
            lives,
            blocks[0].get("block_size") or _first_block_size(payload for _, payload in lives[0]),
            [TrueBlock(block.get("hash"), block["medium"], path) for block, path in zip(blocks, paths, strict=True)],
        )


def _first_block_size(payloads: Iterable[bytes]) -> int:
    """Return the block size of the first stored block, for captures whose list of true blocks has no block size."""
    events = (event for payload in payloads for event in msgspec.msgpack.decode(payload)[1])
    return next(int(event["block_size"]) for event in events if event["type"] == "BlockStored")


def _paths(blocks: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    if "prefix" in blocks[0]:
        return _paths_by_prefix(blocks)
    by_hash = {block["hash"]: block for block in blocks}
    paths = []
    for block in blocks:
        path: list[int] = []
        step: dict[str, Any] | None = block if isinstance(block["hash"], str) else None
        while step is not None:
            path = step["tokens"] + path
            step = by_hash[step["parent"]] if step["parent"] is not None else None
        paths.append(tuple(path))
    return paths


def _paths_by_prefix(blocks: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Return the tokens of the prompt up to each true block, which the capture names only by the SHA-256 of these
    tokens.

    The function tries each stored block after each prefix that it already knows.
    """

    def digest(path: tuple[int, ...]) -> str:
        return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in path)).hexdigest()

    found: dict[str, tuple[int, ...]] = {}
    frontier: list[tuple[int, ...]] = [()]
    while frontier:
        head = frontier.pop()
        for block in blocks:
            path = head + tuple(block["tokens"])
            if block["prefix"] not in found and digest(path) == block["prefix"]:
                found[block["prefix"]] = path
                frontier.append(path)
    return [found[block["prefix"]] for block in blocks]


class Kvbus(KvbusProcess):
    """The process ``kvbus run`` between one engine and its routers. It ends when the ``with`` block ends."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        output: dict[str, Any] | None = None,
        *,
        first_seq: int = 0,
        **config: Any,
    ) -> None:
        self.endpoint, self.replay_endpoint = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        source = {"name": "engine", "endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
        routers = {
            "name": "routers",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "profile": "dynamo",
            "heartbeat": 0.2,
            **(output or {}),
        }
        settings = {
            "model": "m",
            "worker": "w",
            "sources": [source],
            "outputs": [routers],
            "state_dir": None,
            **config,
        }
        super().__init__(directory, settings)
        if first_seq:
            place = without_state(load(None, env={}, overrides=settings), directory)  # the state of an earlier process
            reserve(place, f"routers {routers['endpoint']}", first_seq)

    def __enter__(self) -> Self:
        self.start_again()
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self.terminate()
        self.close()

    def kill_and_start_again(self) -> None:
        """Kill kvbus with SIGKILL, and start it with the same command line."""
        self.kill()
        self.start_again()

    def start_again(self) -> None:
        """Start kvbus, and wait until it is ready."""
        self.start()
        try:
            wait_for(self.ready, f"kvbus is ready (log: {self.log})")
        except BaseException:
            self.close()
            raise

    def last_seq(self, source: int = 0) -> int | None:
        """Return the seq of the last batch that kvbus has read from a source."""
        seq: int | None = self.sources()[source]["last_seq"]
        return seq
