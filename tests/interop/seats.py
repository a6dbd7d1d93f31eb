"""The peers of the hour-long run (:mod:`.hours`): publishers of released engines, and routers at outputs of kvbus."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.conform import judged
from tests.doubles.child import Child, python
from tests.ports import ports_in_a_row
from tests.typed import there

from .cache import Cache, Known
from .kinds import KINDS, LLMD_OUTPUT
from .routers import Kind, Router, Stream
from .scene import REPLAY, Layout
from .test_per_topic import READERS
from .zmtp_peers import HOME_ENV, library

if TYPE_CHECKING:
    from collections.abc import Sequence

DAY: Final = 86_400
JOURNAL: Final = 500
"""Number of batches in an output's journal: it is full after some minutes, so that a long run also tests old
batches.
"""

CACHE: Final = {"capacity": 150, "batches": 50, "recent": 300}


class Peer(Router):
    """A SUB socket of another ZeroMQ library as a router under test. Its blocks are kept as a plain set."""

    def __init__(self, name: str, directory: Path, _log: str) -> None:
        self._running = there(library(name, directory, DAY)).subscriber
        self._stack = contextlib.AsyncExitStack()

    async def start(self, streams: Sequence[Stream]) -> None:
        (stream,) = streams
        self._peer = await self._stack.enter_async_context(self._running(stream.live))

    async def held(self, known: Known) -> set[int]:
        return {block for block in known if (None, "GPU", block) in self._peer.view.blocks}

    async def stop(self) -> None:
        await self._stack.aclose()


def _peer(name: str) -> Kind:
    lacking = lambda: None if library(name, Path()) else f"{HOME_ENV} names no peer on {name}"  # noqa: E731
    return Kind(name, partial(Peer, name), lacking, LLMD_OUTPUT)


MERGED: Final = ("AIBrix", "go-zeromq")
PER_SOURCE: Final = ("Dynamo 1.6.1, indexer", "vLLM router 0", "SMG Rust")
ROUTERS: Final[tuple[tuple[Kind, Layout], ...]] = (
    *((kind, "per_topic") for kind in READERS),
    *((kind, "per_source") for kind in KINDS if kind.name.startswith(PER_SOURCE)),
    *((kind, "merged") for kind in KINDS if kind.name.startswith(MERGED)),
    *((_peer(name), "merged") for name in ("jeromq", "zeromq-rs", "libzmq")),
)


class Engine:
    """A process with the publisher of one released engine, and the simulated cache whose events it publishes."""

    def __init__(self, name: str, rank: int, first: int, directory: Path) -> None:
        self.name = name
        self._rank = rank
        endpoints = (f"tcp://*:{first}", f"tcp://*:{first + REPLAY}")  # the publisher adds its rank to the port
        home = str(there(judged.home_of(name)))
        command = python("tests.interop.programs.engine", home, str(rank), *endpoints)
        self.child = Child(name, command, directory, piped=True)
        self.cache = Cache(seed=rank, rank=rank, by_position=name == "vllm-0.11.1", **CACHE)

    def publish(self) -> None:
        """Publish one batch; do nothing while the process is stopped."""
        if self.child.running:
            there(there(self.child.process).stdin).write(base64.b64encode(self.cache.batch()) + b"\n")

    async def restart(self, away: float = 0.0) -> None:
        """Kill the engine, wait ``away`` seconds, and start it with an empty cache and seqs from 0."""
        await self.child.kill()
        await asyncio.sleep(away)
        self.cache.restart(seed=1000 * self.child.starts + self._rank)
        await self.child.start()


@dataclass
class Seat:
    """A router of the long run, the output of kvbus that it reads, and its results.

    Attributes:
        slowest: maximum number of seconds that the router needed to be exact after the last batch.
    """

    kind: Kind
    layout: Layout
    directory: Path
    streams: list[Stream]
    router: Router | None = None
    starts: int = 0
    exact: int = 0
    slowest: float = 0.0

    @classmethod
    def at_free_ports(cls, kind: Kind, layout: Layout, sources: int, directory: Path) -> Self:
        """Return a seat (a router and the output that it reads) for a router of this kind, at free ports.

        The seat has one stream for each source if the layout is ``per_source``, and one stream for all sources
        otherwise.
        """
        host, live, replay = kind.listens()
        count = 1
        if layout == "per_source":
            count, live = sources, ports_in_a_row(2 * REPLAY)
            replay = live + REPLAY
        return cls(kind, layout, directory, [Stream(host, live + at, replay + at) for at in range(count)])

    @property
    def output(self) -> dict[str, Any]:
        first = self.streams[0]
        place = {"endpoint": first.live, "replay_endpoint": first.replay, "layout": self.layout}
        return {"name": self.slug, "journal_batches": JOURNAL, **place, **self.kind.output}

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z]+", "-", self.kind.name.lower()).strip("-")

    @property
    def logs(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.directory.glob(f"{self.slug}-*.log")))

    async def restart(self) -> None:
        """Stop the router, if there is one, and start a new router with an empty view."""
        if self.router is not None:
            await self.router.stop()
        self.starts += 1
        self.router = self.kind.make(self.directory, f"{self.slug}-{self.starts}")
        await self.router.start(self.streams)
