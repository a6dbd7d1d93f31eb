"""Test for the manual upgrade in docs/OPERATIONS.md: run the page's commands in a checkout while a router reads.

TEST_UPGRADE_FROM names the older commit, for example HEAD~1. The commands install packages, so they need a package
index.
"""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.doubles.bus import eventually
from tests.ports import ports_in_a_row

from .cache import score
from .kinds import KINDS
from .routers import Kind, Stream
from .scene import Rank
from .support import Kvbus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT: Final = Path(__file__).parents[2]
OLDER: Final = os.environ.get("TEST_UPGRADE_FROM")
RATE: Final = 30
"""Number of batches that the engine publishes in a second."""
ROUTERS: Final = ("llm-d-kv-cache 0.9.0", "Dynamo 1.6.1, indexer", "vLLM router 0.1.17")


class Installed(Kvbus):
    """The process `kvbus run` of the virtual environment in a checkout."""

    checkout: Path

    @property
    def command(self) -> list[str]:
        return [str(self.checkout / ".venv/bin/kvbus"), *self.args]


class Subscriber:
    """A SUB socket that records each batch: its time, its seq, and whether it clears."""

    def __init__(self, endpoint: str) -> None:
        self.batches: list[tuple[float, int, bool]] = []
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    async def read(self) -> None:
        while True:
            _, seq, payload = await self._socket.recv_multipart()
            events = msgspec.msgpack.decode(payload)[1]
            clears = any("AllBlocksCleared" in (each if isinstance(each, list) else each.values()) for each in events)
            self.batches.append((time.monotonic(), int.from_bytes(seq, "big"), clears))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def since(self, first: int) -> tuple[list[tuple[int, int, bool]], int, float]:
        """Return what happened since batch ``first``: the jumps of seqs, the number of clears, and the longest
        silence in seconds.

        A jump is a tuple of the seqs before and after it, and whether the batch after it clears, as the first batch of
        a state does.
        """
        seen = self.batches[first:]
        pairs = list(itertools.pairwise(seen))
        jumps = [(one, other, clears) for (_, one, _), (_, other, clears) in pairs if other != one + 1]
        return jumps, sum(clears for _, _, clears in seen), max(after[0] - before[0] for before, after in pairs)


def git(*words: str, where: Path = ROOT) -> str:
    done = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True)
    return done.stdout.strip()


async def shell(command: str, where: Path) -> None:
    """Run a shell command of a page in a directory, without the variables of this Python's virtual environment."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    process = await asyncio.create_subprocess_shell(
        command, cwd=where, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, f"{command}\n{said.decode()}"


def commands(page: Path, beginning: str) -> list[str]:
    """Find the code block on a page whose first command begins with a text, and return the lines of the block."""
    (block,) = re.findall(rf"```\n *({re.escape(beginning)}.*?)```", page.read_text(), re.DOTALL)
    return [line.strip() for line in block.strip().splitlines()]


def is_installed(checkout: Path) -> bool:
    """Return whether the checkout's virtual environment contains the modules of the commit that is checked out."""
    (package,) = checkout.glob(".venv/lib/python*/site-packages/kvbus")
    names = [path for path in git("ls-files", "kvbus", where=checkout).splitlines() if path.endswith(".py")]
    return not any(filecmp.cmpfiles(checkout, package.parent, names, shallow=False)[1:])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone at the older commit, installed as its README says. The newer commit is in its origin."""
    if OLDER is None:
        pytest.skip("TEST_UPGRADE_FROM names no commit: TEST_UPGRADE_FROM=HEAD~1, as .ci/run does")
    older = git("rev-parse", OLDER)
    origin = tmp_path_factory.mktemp("origin")
    clone = tmp_path_factory.mktemp("checkout")
    git("clone", "--quiet", "--bare", str(ROOT), str(origin))
    git("clone", "--quiet", str(origin), str(clone))
    git("reset", "--quiet", "--hard", older, where=clone)
    for line in commands(clone / "README.md", "python3 -m venv .venv"):
        asyncio.run(shell(line, clone))
    return clone


class Upgrade:
    """A kvbus between an engine that publishes all the time, one router and one subscriber."""

    def __init__(self, kind: Kind, checkout: Path, directory: Path) -> None:
        (directory / "bus").mkdir()
        self.checkout = checkout
        self.rank = Rank(0, ports_in_a_row(8), kind)
        state = str(directory / "state")
        self.bus = Installed(self.rank.publisher, directory / "bus", {"heartbeat": 1, **kind.output}, state_dir=state)
        self.bus.checkout = checkout
        self.router = kind.make(directory, "router")
        self.subscriber = Subscriber(self.bus.endpoint)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine, kvbus, the router and the subscriber."""
        ports = [int(each.rpartition(":")[2]) for each in (self.bus.endpoint, self.bus.replay_endpoint)]
        async with self.rank.publisher:
            with self.bus:
                shutil.copyfile(self.bus.file, self.checkout / "kvbus.yaml")
                reading = asyncio.ensure_future(self.subscriber.read())
                try:
                    await self.router.start([Stream("127.0.0.1", *ports)])
                    yield
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                    self.subscriber.close()
                    await self.router.stop()

    @contextlib.asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Let the engine publish. At the end, wait until the router holds exactly the engine's blocks."""
        ending = asyncio.Event()

        async def publish() -> None:
            while not ending.is_set():
                self.rank.publisher.publish(self.rank.cache.batch())
                await asyncio.sleep(1 / RATE)

        task = asyncio.ensure_future(publish())
        try:
            yield
        finally:
            ending.set()
            await task
        async with asyncio.timeout(60):
            while any(score(await self.router.held(self.rank.cache.known), self.rank.cache.live)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def relayed(self, count: int) -> None:
        """Wait until the subscriber has received ``count`` more batches from kvbus."""
        wanted = len(self.subscriber.batches) + count
        await eventually(lambda: len(self.subscriber.batches) >= wanted, "kvbus relays")

    async def follow(self, lines: list[str], commit: str) -> str:
        """Run the page's commands for an upgrade, and return how long each part took.

        The last command restarts a systemd service. The test sends SIGTERM and starts kvbus with the same command line
        instead.
        """
        first, begin = len(self.subscriber.batches) - 1, time.monotonic()
        *installation, restart = lines
        assert restart.startswith("systemctl restart kvbus")
        for line in installation:
            await shell(line, self.checkout)
        assert git("rev-parse", "HEAD", where=self.checkout) == commit
        assert is_installed(self.checkout)
        installed = time.monotonic()
        self.bus.signal(signal.SIGTERM)
        assert await self.bus.ends() == 0
        ended = time.monotonic()
        self.bus.start()
        await eventually(self.bus.ready, "kvbus is ready")
        ready = time.monotonic()
        await self.relayed(100)
        jumps, clears, silence = self.subscriber.since(first)
        assert all(after > before and with_state for before, after, with_state in jumps), jumps
        assert clears == 1, "the state that comes with the subscription, and no other clear"
        assert self.bus.metric("kvbus_state_refused_total") == 0
        (source,) = self.bus.sources()
        assert (source["state"], source["partial"]) == ("live", False)
        return (
            f"installation {installed - begin:.1f} s, end {ended - installed:.1f} s, start {ready - ended:.1f} s, longest "
            f"silence {silence:.1f} s, {len(self.subscriber.batches) - first} batches, jumps {jumps}"
        )


@pytest.mark.slow
@pytest.mark.xdist_group("upgrade")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in ROUTERS], ids=lambda kind: kind.name)
async def test_a_router_loses_no_block_during_an_upgrade_of_kvbus(kind: Kind, checkout: Path, tmp_path: Path) -> None:
    if lacking := kind.lacking():
        pytest.skip(lacking)
    older, newer = (git("rev-parse", commit, where=checkout) for commit in ("HEAD", "@{upstream}"))
    lines = commands(ROOT / "docs/OPERATIONS.md", "git pull")
    here = Upgrade(kind, checkout, tmp_path)
    async with here.running():
        async with here.publishing():
            await here.relayed(100)
            print(f"{kind.name}, upgrade: {await here.follow(lines, newer)}")  # noqa: T201
        async with here.publishing():
            back = [f"git reset --quiet --hard {older}", *lines[1:]]
            print(f"{kind.name}, downgrade: {await here.follow(back, older)}")  # noqa: T201
