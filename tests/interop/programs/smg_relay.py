"""Run SMG's relay, in Python or in Rust, and a minimal gateway that reads the relay.

As in SMG's gateway, the copies of a block are counted for all ranks of the worker together, and a clear of one rank
removes the blocks of all ranks. When a stream breaks off, the gateway also removes the blocks, and subscribes again
from 0.

    python smg_relay.py [--rust] [--no-replay]

The program runs in its own environment (`.ci/routers.sh`) and reads lines of JSON as all router programs of these tests
do.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import sys
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from smg.servicer import VllmGrpcServer, init_servicer_tracing
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated.common_pb2 import SubscribeKvEventsRequest
from smg_grpc_servicer.kv_relay import Engine, RankSource, relay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

MASK = 2**64 - 1
"""Mask that makes a hash an unsigned 64-bit number. The relay sends the hashes of blocks as signed integers."""

MAX_COPIES = 8
"""Maximum number of copies that the gateway counts of one block."""

RESUBSCRIBE = 0.5
"""Seconds that the gateway waits after a stream has ended before it subscribes again."""


class StreamBrokenError(Exception):
    """An error: SMG's relay has ended a subscription, so the gateway must drop the blocks that it got from this
    subscription.
    """


class Call:
    """A stand-in for a gRPC call, with only the methods that the Python relay uses."""

    def cancelled(self) -> bool:
        return False

    async def send_initial_metadata(self, _metadata: Any) -> None:
        """Ignore the headers: the gateway does not wait for them."""

    async def abort(self, _code: Any, details: str) -> None:
        raise StreamBrokenError(details)


class Gateway:
    """A minimal gateway that reads SMG's relay and keeps the blocks of one worker."""

    def __init__(self, subscribe: Callable[[], AsyncIterator[Any]]) -> None:
        self.blocks: collections.Counter[int] = collections.Counter()
        self._subscribe = subscribe

    async def follow(self) -> None:
        """Subscribe to the relay, and subscribe again each time a stream ends."""
        log = logging.getLogger(__name__)
        while True:
            try:
                async for batch in self._subscribe():
                    if batch.HasField("snapshot") and not batch.snapshot.index:
                        log.info("snapshot at %d: %s", batch.sequence_number, str(batch.snapshot).replace("\n", " "))
                    for event in batch.events:
                        self._apply(event)
            except (StreamBrokenError, grpc.aio.AioRpcError) as error:
                log.warning("%s", error)
            self.blocks.clear()
            await asyncio.sleep(RESUBSCRIBE)

    def _apply(self, event: Any) -> None:
        kind = event.WhichOneof("data")
        if kind == "stored":
            for block in event.stored.blocks:
                name = block.block_hash & MASK
                self.blocks[name] = min(self.blocks[name] + 1, MAX_COPIES)
        elif kind == "removed":
            for block in event.removed.block_hashes:
                name = block & MASK
                self.blocks[name] -= 1
                if self.blocks[name] <= 0:
                    del self.blocks[name]
        elif kind == "cleared":
            self.blocks.clear()


def replay_of(stream: dict[str, str]) -> str | None:
    """Return the replay endpoint of a stream, or None if the program was started with --no-replay."""
    return None if "--no-replay" in sys.argv else stream["replay"]


@contextlib.contextmanager
def python_relay(streams: list[dict[str, str]]) -> Iterator[list[Gateway]]:
    """Relay all streams with one Python relay in this process."""
    sources = [RankSource(rank, stream["live"], replay_of(stream)) for rank, stream in enumerate(streams)]
    yield [Gateway(lambda: relay(sources, Engine.VLLM, 0, Call()))]


@contextlib.contextmanager
def rust_relay(streams: list[dict[str, str]]) -> Iterator[list[Gateway]]:
    """Run one Rust server of SMG for each stream, and yield a gateway for each server.

    A server reads events from the stream's endpoints. It also waits for an engine at an ``ipc://`` address, but can
    relay events although no engine connects there.
    """
    init_servicer_tracing("info")
    with contextlib.ExitStack() as stack:
        gateways = []
        for rank, stream in enumerate(streams):
            server = VllmGrpcServer(
                "127.0.0.1:0",
                f"ipc://{tempfile.gettempdir()}/{os.getpid()}-{rank}",
                "tcp://127.0.0.1:0",
                "m",
                kv_events_endpoint=stream["live"],
                kv_events_replay_endpoint=replay_of(stream) or "",
            )
            stack.callback(server.stop)
            stub = vllm_engine_pb2_grpc.VllmEngineStub(grpc.aio.insecure_channel(server.address))
            gateways.append(Gateway(partial(stub.SubscribeKvEvents, SubscribeKvEventsRequest())))
        yield gateways


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the Rust relay logs to standard output
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    first = json.loads(await asyncio.to_thread(sys.stdin.readline))
    start = rust_relay if "--rust" in sys.argv else python_relay
    with start(first["streams"]) as gateways:
        following = [asyncio.ensure_future(gateway.follow()) for gateway in gateways]
        while line := await asyncio.to_thread(sys.stdin.readline):
            for each in following:
                if each.done():
                    each.result()
            known = {block for block, *_ in json.loads(line)["known"]}
            held = set().union(*(gateway.blocks for gateway in gateways)) & known
            print(json.dumps({"held": sorted(held)}), file=answers, flush=True)


asyncio.run(main())
