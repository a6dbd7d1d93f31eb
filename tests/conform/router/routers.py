"""Play the cases of the conformance kit to the routers of ``tests.interop``.

``python -m tests.conform.router.routers NAME…`` plays all cases to these routers, and writes the results to files.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import aiohttp

from kvbus.tools.conform.report import Report
from kvbus.tools.conform.router import adapters
from kvbus.tools.conform.router.adapters import BLOCK_SIZE, Adapter, AdapterError
from kvbus.tools.conform.router.cases import CASES, as_arrays
from kvbus.tools.conform.router.play import Player, Settings, judge
from kvbus.tools.conform.router.views import MASK, HeldBlock, Known, View
from tests.conform.results import store
from tests.interop import kinds, vllm_router
from tests.interop.cache import Block
from tests.interop.dynamo import DynamoIndexer
from tests.interop.routers import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvbus.tools.conform.router.cases import Case
    from tests.interop.routers import Kind, Router


SETTLE_S: Final = 10.0
MODEL: Final = "kvbus-conform"
TIERS: Final = {"device": "GPU", "host_pinned": "CPU", "disk": "DISK"}


class OfKind(Adapter):
    """A router of the table in docs/INTEROP.md, started anew for each case.

    Args:
        kind: the kind of router.
        directory: directory of the router's logs.
    """

    fresh = True

    def __init__(self, kind: Kind, directory: Path) -> None:
        self._kind: Final = kind
        self._directory: Final = directory
        self._by_prefix: Final = kind.name.startswith("vLLM router")
        self._router: Router | None = None
        self._cases = 0

    async def start(self, streams: Sequence[adapters.Stream]) -> None:
        self._cases += 1
        directory = self._directory / str(self._cases)
        directory.mkdir()
        self._router = self._kind.make(directory, "router")
        split = [(urlsplit(stream.live), urlsplit(stream.replay)) for stream in streams]
        await self._router.start(
            [Stream(str(live.hostname), live.port or 0, replay.port or 0) for live, replay in split]
        )

    async def view(self, known: Known) -> View:
        assert self._router is not None
        asked: dict[int, Block] = {}
        for block, source in known.items():
            # Leave out blocks that a request cannot reach from its beginning.
            if source.parent is None or source.parent in asked:
                asked[block] = Block(source.parent, tuple(source.tokens))
        try:
            held = await self._router.held(asked)
        except (AssertionError, ConnectionError) as error:
            raise AdapterError(f"the router ended: {str(error)[-200:]}", crashed=True) from error
        return View(frozenset(HeldBlock(block & MASK) for block in held), by_prefix=self._by_prefix)

    async def stop(self) -> None:
        if self._router is not None:
            await self._router.stop()


class OfIndexer(Adapter):
    """Dynamo's indexer, started anew for each case. Each stream is one rank of the same worker.

    Args:
        directory: directory of the indexer's logs.
    """

    fresh = True

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._cases = 0

    async def start(self, streams: Sequence[adapters.Stream]) -> None:
        self._cases += 1
        self._indexer = DynamoIndexer(self._directory / f"{self._cases}.log").__enter__()
        for rank, stream in enumerate(streams):
            await self._call("register", {
                "instance_id": 1, "endpoint": stream.live, "replay_endpoint": stream.replay,
                "model_name": MODEL, "block_size": BLOCK_SIZE, "dp_rank": rank,
            })  # fmt: skip

    async def view(self, known: Known) -> View:
        dump = json.loads(await self._call("dump"))
        held = set()
        for entry in dump.get(f"{MODEL}:default", {}).get("events", []):
            medium = TIERS.get(entry["storage_tier"])
            for block in entry["event"]["data"]["stored"]["blocks"]:
                held.add(HeldBlock(block["block_hash"] & MASK, medium, None, entry["event"]["dp_rank"]))
        return View(frozenset(held), frozenset({"medium", "rank"}))

    async def stop(self) -> None:
        if self._cases:
            self._indexer.__exit__(None, None, None)

    async def _call(self, path: str, body: object = None) -> str:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
                session.request("GET" if body is None else "POST", f"{self._indexer.url}/{path}", json=body) as answer,
            ):
                answer.raise_for_status()
                return await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AdapterError(f"{path}: {error}") from error


def kind_named(name: str) -> Kind:
    return next(kind for kind in kinds.KINDS if kind.name.startswith(name))


def slug(kind: Kind) -> str:
    """Return the name of a router's file of results."""
    return re.sub(r"[^a-z0-9.-]+", "-", kind.name.lower())


def player_of(kind: Kind, directory: Path, settle: float) -> Player:
    def place() -> tuple[str, str]:
        host, live, replay = kind.listens()
        return f"tcp://{host}:{live}", f"tcp://{host}:{replay}"

    adapter = OfIndexer(directory) if kind.make is kinds.Indexer else OfKind(kind, directory)
    return Player(adapter, Settings(new_endpoints=place, topic=kind.topic, settle=settle))


def cases_for(kind: Kind, cases: Sequence[Case]) -> list[Case]:
    return [as_arrays(case) for case in cases] if kind.by_position else list(cases)


async def tried(kind: Kind, directory: Path) -> Report:
    """Play all cases to a router, and return the report."""
    report = Report("router", kind.name)
    player = player_of(kind, directory, SETTLE_S)
    await judge(player, cases_for(kind, CASES), report, lambda text: sys.stderr.write(f"{text}\n"))
    return report


def main() -> None:
    for module in (kinds, vllm_router):
        setattr(module, "BLOCK_SIZE", BLOCK_SIZE)  # noqa: B010 - it is theirs
    for name in sys.argv[1:]:
        kind = kind_named(name)
        if lacking := kind.lacking():
            sys.stderr.write(f"{kind.name}: {lacking}\n")
            continue
        with tempfile.TemporaryDirectory() as directory:
            report = asyncio.run(tried(kind, Path(directory)))
        how = f"each case {SETTLE_S:g} s to settle" + (", events as arrays" if kind.by_position else "")
        store(f"routers/{slug(kind)}", kind.name, how, report.without_bytes().to_json())


if __name__ == "__main__":
    main()
