"""A subscriber whose ZeroMQ, like go-zeromq, does not know ZMTP commands and treats a PING as a message.

It never answers a PING. Like llm-d, it reconnects 5 s after its connection broke, and never asks for missed batches.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final
from urllib.parse import urlsplit

from tests.doubles.router import PlainSetRouter
from tests.transport.bare import BarePeer

REDIAL: Final = 5.0


class PingAsMessage:
    """A router that treats a ZMTP PING as a message, and never answers it. It reads one live stream.

    It connects again whenever its connection breaks.
    """

    def __init__(self, endpoint: str) -> None:
        self.view = PlainSetRouter()
        self.odd = 0
        """Number of received messages that are not batches."""
        self.lost = 0
        """Number of times that the router's connection broke."""
        self._at = urlsplit(endpoint)
        self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                peer = BarePeer(*await asyncio.open_connection(self._at.hostname, self._at.port), kind=b"SUB")
                try:
                    await self._follow(peer)
                finally:
                    await peer.close()
                self.lost += 1
            await asyncio.sleep(REDIAL)

    async def _follow(self, peer: BarePeer) -> None:
        read = 0
        subscribed = False
        while not peer.gone or read < len(peer.messages):
            if peer.commands and not subscribed:
                subscribed = True
                peer.send(b"\x01")
            for frames in peer.messages[read:]:
                self._take(frames)
                read += 1
            self.odd += peer.commands.count(b"PING")
            peer.commands[:] = [name for name in peer.commands if name != b"PING"]
            await asyncio.sleep(0.005)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and len(frames[1]) == 8:
            self.view.take(int.from_bytes(frames[1], "big"), frames[2])
        else:
            self.odd += 1

    def hashes(self) -> set[int]:
        """Return the hashes of all blocks that the router knows. Omit hashes that are not integers."""
        return {block for _, _, block in self.view.blocks if isinstance(block, int)}

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
