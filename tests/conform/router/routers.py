"""The routers of ``tests.interop`` as routers that the kit tries.

``python -m tests.conform.router.routers NAME…`` plays all cases to them, and prints a row for each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvbus.conform.report import Report
from kvbus.conform.router.adapters import BLOCK_SIZE, Adapter, AdapterError
from kvbus.conform.router.cases import CASES
from kvbus.conform.router.judge import judge
from kvbus.conform.router.play import Player, Settings
from kvbus.conform.router.views import MASK, Held, Known, View
from tests.interop import kinds, vllm_router
from tests.interop.cache import Block
from tests.interop.routers import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvbus.conform.router import adapters
    from tests.interop.routers import Kind, Router


class OfKind(Adapter):
    """A router of the table of docs/INTEROP.md, started for each case.

    Args:
        kind: the router.
        directory: of its logs.
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
            if source.parent is None or source.parent in asked:  # what a request cannot lead to is not asked for
                asked[block] = Block(source.parent, tuple(source.tokens))
        try:
            held = await self._router.held(asked)
        except (AssertionError, ConnectionError) as error:
            raise AdapterError(f"the router ended: {str(error)[-200:]}", crashed=True) from error
        return View(frozenset(Held(block & MASK) for block in held), by_prefix=self._by_prefix)

    async def stop(self) -> None:
        if self._router is not None:
            await self._router.stop()


def kind_named(name: str) -> Kind:
    return next(kind for kind in kinds.KINDS if kind.name.startswith(name))


async def tried(kind: Kind, directory: Path, settle: float) -> Report:
    """Play all cases to a router."""
    report = Report("router", kind.name)
    player = Player(OfKind(kind, directory), Settings(topic=kind.topic, settle=settle))
    await judge(player, CASES, report, lambda text: sys.stderr.write(f"{text}\n"))
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
            report = asyncio.run(tried(kind, Path(directory), 5.0))
        sys.stdout.write(json.dumps(report.without_bytes().to_json()) + "\n")


if __name__ == "__main__":
    main()
