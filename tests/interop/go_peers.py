"""Run the Go programs of ``tests/interop/gozmq`` as processes: peers on go-zeromq, which llm-d and its simulator use.

go-zeromq has its own implementation of ZMTP. It answers no ZMTP command: it gives the PING of a heartbeat to the
program as a message of one frame.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from tests.doubles.bus import eventually
from tests.doubles.child import Child
from tests.doubles.router import PlainSetRouter
from tests.interop.talker import Talker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

HOME_ENV: Final = "TEST_GOZMQ_HOME"
SECONDS_ENV: Final = "TEST_INTEROP_SECONDS"
END: Final = b"\xff" * 8


class GoSubscriber(Talker):
    """A router on go-zeromq.

    It has two views: the blocks after its live batches, and the blocks after the answers to its replay requests.
    """

    def __init__(self, child: Child) -> None:
        super().__init__(child)
        self.live = PlainSetRouter()
        self.replayed = PlainSetRouter()
        self.odd: list[list[str]] = []
        """Messages that are neither a batch nor END, each as a list of its frames in hex."""
        self.errors: list[str] = []
        """Reasons why connections were lost or could not be made."""

    def heard(self, said: dict[str, Any]) -> None:
        """Apply one line of the program's output: a batch or an error."""
        if "error" in said:
            self.errors.append(said["error"])
        if "frames" in said:
            self._take(said["what"], [bytes.fromhex(frame) for frame in said["frames"]])

    async def connected(self) -> None:
        """Wait until the live and the replay connection of the program are open.

        A failure shows the program's output.
        """
        with contextlib.suppress(AssertionError):
            await eventually(lambda: self.said["connected"] >= 2 or self.reading.done(), "its connections")
        if self.reading.done():
            self.reading.result()
        process = self.child.process
        assert process is not None
        why = f"{dict(self.said)}, {self.errors}, exit status {process.returncode}\n{self.child.log.read_text()}"
        assert self.said["connected"] >= 2, why

    def _take(self, what: str, frames: list[bytes]) -> None:
        if len(frames) != (3 if what == "message" else 4) or len(frames[-2]) != 8:
            self.odd.append([frame.hex() for frame in frames])
        elif frames[-2] != END:
            view = self.live if what == "message" else self.replayed
            view.apply(int.from_bytes(frames[-2], "big"), frames[-1])


class GoPublisher:
    """An engine on go-zeromq, with the methods of an `EnginePublisher` that the tests use."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def subscribed(self) -> None:
        """Wait until a peer has subscribed to the Go publisher."""
        assert self._child.process is not None
        assert self._child.process.stdout is not None
        async with asyncio.timeout(60):
            said = await self._child.process.stdout.readline()
        assert said == b"subscribed\n", self._child.log.read_text()

    def publish(self, payload: bytes, *, live: bool = True) -> None:
        assert live, "it loses nothing on its own"
        assert self._child.process is not None
        assert self._child.process.stdin is not None
        self._child.process.stdin.write(payload.hex().encode() + b"\n")


@contextlib.asynccontextmanager
async def subscriber(home: Path, logs: Path, live: str, replay: str) -> AsyncIterator[GoSubscriber]:
    """Run a subscriber; yield it when both of its connections are up."""
    async with _running(Child("go-subscriber", [str(home / "subscriber"), live, replay], logs, piped=True)) as child:
        router = GoSubscriber(child)
        try:
            await router.connected()
            yield router
        finally:
            await router.close()


@contextlib.asynccontextmanager
async def publisher(home: Path, logs: Path, how: str, live: str, replay: str) -> AsyncIterator[GoPublisher]:
    """Run an engine on go-zeromq, and yield it.

    `how` says whether its live socket binds the endpoint or connects to it.
    """
    command = [str(home / "publisher"), how, live, replay]
    async with _running(Child(f"go-publisher-{how}", command, logs, piped=True)) as child:
        yield GoPublisher(child)


@contextlib.asynccontextmanager
async def _running(child: Child) -> AsyncIterator[Child]:
    await child.start()
    try:
        yield child
    finally:
        await child.close()
