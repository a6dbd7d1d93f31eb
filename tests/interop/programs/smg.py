"""SMG's relay, and the least of a gateway that can stand behind it: a set, cleared and asked for anew when a stream breaks off.

It runs in an environment of its own (`.ci/routers.sh`) and takes lines of JSON as every program of a router does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from smg_grpc_servicer.kv_relay import Engine, RankSource, relay

MASK = 2**64 - 1
"""The relay names blocks by signed numbers."""

RESUBSCRIBE = 0.5
"""Seconds between a stream's end and the next one."""


class StreamBrokenError(Exception):
    """The relay has ended the call: what it sent is void."""


class Call:
    """What the relay needs of a gRPC call."""

    def cancelled(self) -> bool:
        return False

    async def send_initial_metadata(self, _metadata: Any) -> None:
        """Headers: nobody waits for them."""

    async def abort(self, _code: Any, details: str) -> None:
        raise StreamBrokenError(details)


class Gateway:
    """The blocks of every rank."""

    def __init__(self, sources: list[RankSource]) -> None:
        self.blocks: dict[int, set[int]] = {}
        self._sources = sources

    async def follow(self) -> None:
        """Subscribe for ever."""
        while True:
            try:
                async for batch in relay(self._sources, Engine.VLLM, 0, Call()):
                    for event in batch.events:
                        self._apply(self.blocks.setdefault(batch.dp_rank, set()), event)
            except StreamBrokenError as error:
                logging.getLogger(__name__).warning("%s", error)
            self.blocks.clear()
            await asyncio.sleep(RESUBSCRIBE)

    def _apply(self, blocks: set[int], event: Any) -> None:
        kind = event.WhichOneof("data")
        if kind == "stored":
            blocks.update(block.block_hash & MASK for block in event.stored.blocks)
        elif kind == "removed":
            blocks.difference_update(block & MASK for block in event.removed.block_hashes)
        elif kind == "cleared":
            blocks.clear()


async def main() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    first = json.loads(await asyncio.to_thread(sys.stdin.readline))
    gateway = Gateway(
        [RankSource(rank, stream["live"], stream["replay"]) for rank, stream in enumerate(first["streams"])]
    )
    following = asyncio.ensure_future(gateway.follow())
    while line := await asyncio.to_thread(sys.stdin.readline):
        if following.done():
            following.result()
        known = {block for block, *_ in json.loads(line)["known"]}
        held = set().union(*gateway.blocks.values()) & known
        print(json.dumps({"held": sorted(held)}), flush=True)  # noqa: T201 - this is what it is asked for


asyncio.run(main())
