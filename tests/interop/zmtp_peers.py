"""Sockets of other ZeroMQ libraries as processes: programs of ours on JeroMQ (Java) and on the crate ``zeromq`` (Rust)."""

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
"""Seconds after which a program ends by itself, unless told otherwise."""

_NUMBERS: Final = itertools.count()


@dataclass(frozen=True)
class Library:
    """One library, and how its program is run."""

    name: str
    program: Sequence[str]
    logs: Path
    lifetime: int = LIFETIME

    @contextlib.asynccontextmanager
    async def run(self, *arguments: str) -> AsyncIterator[ForeignPeer]:
        """The program, with its socket there."""
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
        """A SUB that connects, or binds."""
        return self.run("subscribe", how, endpoint, topic, *options)

    def requester(self, endpoint: str, *frames: bytes, how: str = "dealer", options: Sequence[str] = ()) -> Running:
        """A DEALER, or a REQ, that has sent one request."""
        return self.run("ask", how, endpoint, ",".join(frame.hex() for frame in frames), *options)


if TYPE_CHECKING:
    Running = contextlib.AbstractAsyncContextManager["ForeignPeer"]


def library(name: str, logs: Path, lifetime: int = LIFETIME) -> Library | None:
    """The library of this name, or None where its program was not built. libzmq only subscribes."""
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
    """One running program, and what it was given."""

    def __init__(self, child: Child) -> None:
        super().__init__(child)
        self.messages: list[list[bytes]] = []
        self.view = PlainSetRouter()
        """Of the live batches, whatever their numbers."""

    def heard(self, said: dict[str, Any]) -> None:
        """Take in a message."""
        if said["what"] == "message":
            self.messages.append([bytes.fromhex(frame) for frame in said["frames"]])
            _, *rest = self.messages[-1]
            if len(rest) == 2 and len(rest[0]) == 8:
                self.view.take(int.from_bytes(rest[0], "big"), rest[1])

    @property
    def seqs(self) -> list[int]:
        """Of the live batches."""
        return [int.from_bytes(seq, "big") for _, seq, _ in self.messages]

    async def count(self, what: str, number: int = 1) -> None:
        """Wait until it has said this so often; not where it has ended."""
        condition = f"{self.child.name} {what} ({self.child.log})"
        await eventually(lambda: self.said[what] >= number or self.reading.done(), condition)
        assert self.said[what] >= number, f"{condition}: it has ended\n{self.child.log.read_text()}"
