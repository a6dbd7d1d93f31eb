"""Sockets of other ZeroMQ libraries as processes: test programs on JeroMQ (Java) and on the crate ``zeromq`` (Rust)."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.doubles.bus import eventually
from tests.doubles.child import Child, python
from tests.doubles.router import PlainSetRouter
from tests.interop.talker import Talker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

HOME_ENV: Final = "TEST_ZMTP_PEERS_HOME"
LIFETIME: Final = 900
"""Default number of seconds after which a test program ends by itself, even if the test was killed."""

_NUMBERS: Final = itertools.count()


@dataclass(frozen=True)
class Library:
    """A ZeroMQ library, and the command of the test program that uses it."""

    name: str
    program: Sequence[str]
    logs: Path
    lifetime: int = LIFETIME

    @contextlib.asynccontextmanager
    async def run(self, *arguments: str) -> AsyncIterator[ForeignPeer]:
        """Run the library's test program, and yield it when its socket is open."""
        command = [*self.program, str(self.lifetime), *arguments]
        child = Child(f"{self.name}-{next(_NUMBERS)}", command, self.logs, piped=True)
        await child.start()
        peer = ForeignPeer(child)
        try:
            yield peer
        finally:
            await peer.close()
            await child.close()

    def subscriber(self, endpoint: str, topic: str = "", *options: str, how: str = "connect") -> Running:
        """Run a program with a SUB socket. ``how`` says whether the socket connects or binds."""
        return self.run("subscribe", how, endpoint, topic, *options)

    def publisher(self, endpoint: str, *options: str, how: str = "bind") -> Running:
        """Run a program with a PUB socket. ``how`` says whether the socket connects or binds."""
        return self.run("publish", how, endpoint, "", *options)

    def requester(self, endpoint: str, *frames: bytes, how: str = "dealer", options: Sequence[str] = ()) -> Running:
        """Run a program with a DEALER or a REQ socket that has sent one request."""
        return self.run("ask", how, endpoint, ",".join(frame.hex() for frame in frames), *options)


if TYPE_CHECKING:
    Running = contextlib.AbstractAsyncContextManager["ForeignPeer"]


def library(name: str, logs: Path, lifetime: int = LIFETIME) -> Library | None:
    """Return the ZeroMQ library of this name with its test program, or None if the program was not built.

    The program on libzmq can only subscribe.
    """
    if name == "libzmq":
        return Library(name, python("tests.interop.programs.libzmq"), logs, lifetime)
    home = os.environ.get(HOME_ENV)
    if not home:
        return None
    java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-cp", f"{home}/jeromq/classes:{home}/jeromq/jars/*", "Peer"]
    programs = {
        "jeromq": (java, "jeromq/classes/Peer.class"),
        "zeromq-rs": ([f"{home}/zeromq-rs/peer"], "zeromq-rs/peer"),
    }
    program, built = programs[name]
    return Library(name, program, logs, lifetime) if os.path.exists(f"{home}/{built}") else None  # noqa: PTH110 - a word more


class ForeignPeer(Talker):
    """A running test program on another ZeroMQ library, and the messages that it received."""

    def __init__(self, child: Child) -> None:
        super().__init__(child)
        self.messages: list[list[bytes]] = []
        self.view = PlainSetRouter()
        """The blocks that result from the received live batches. The seqs of the batches are not checked."""

    def heard(self, said: dict[str, Any]) -> None:
        """Record a received message, and apply it if it is a batch."""
        if said["what"] == "message":
            self.messages.append([bytes.fromhex(frame) for frame in said["frames"]])
            _, *rest = self.messages[-1]
            if len(rest) == 2 and len(rest[0]) == 8:
                self.view.take(int.from_bytes(rest[0], "big"), rest[1])

    @property
    def seqs(self) -> list[int]:
        """The seqs of the live batches that the program received."""
        return [int.from_bytes(seq, "big") for _, seq, _ in self.messages]

    def publish(self, *frames: bytes) -> None:
        """Let the program of a publisher send a message."""
        assert self.child.process is not None
        assert self.child.process.stdin is not None
        self.child.process.stdin.write(",".join(frame.hex() for frame in frames).encode() + b"\n")

    async def count(self, what: str, number: int = 1) -> None:
        """Wait until the program has reported this event ``number`` times. Fail if the program ends before."""
        condition = f"{self.child.name} {what} ({self.child.log})"
        await eventually(lambda: self.said[what] >= number or self.reading.done(), condition)
        assert self.said[what] >= number, f"{condition}: it has ended\n{self.child.log.read_text()}"
