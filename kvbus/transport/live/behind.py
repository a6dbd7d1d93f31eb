"""Routers that are behind, in turn: each gets the rest of its state, then batches of the ring, as fast as it reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from kvbus.core.outputs.state_transfer import Reading
from kvbus.transport.live.ring import Ring
from kvbus.transport.live.router import Router, RouterState
from kvbus.transport.zmtp.frames import encode_message

TURN: Final = 0.002
"""Seconds that routers which are behind may take in one turn of the loop."""

PIECE: Final = 64 * 1024
"""Bytes that a router which is behind gets before the next one has its turn."""

UNSENT: Final = 256 * 1024
"""Bytes that the kernel may keep for a router and cannot send. It would keep 4 MiB: nobody would know that a router
which stalls is behind, and it would read all of that before the state that makes up for what it lost."""


class Behind:
    """The routers of a stream that have not got everything yet.

    Args:
        ring: batches that any of them lacks.
        current: the routers that have everything, by the id of their peer. They come from there, and go there.
        has_state: called with a router that has all of its state.
    """

    def __init__(
        self,
        ring: Ring,
        current: dict[int, Router],
        has_state: Callable[[Router], None],
    ) -> None:
        self.routers: dict[int, Router] = {}
        """By the id of their peer."""
        self._ring = ring
        self._current = current
        self._has_state = has_state
        self._loop = asyncio.get_running_loop()
        self._line: deque[Router] = deque()
        """Those that may be written to."""
        self._turn: asyncio.Handle | None = None

    def add(self, router: Router, position: int) -> None:
        """A router lacks what is at a position of the ring, and all behind it."""
        self._current.pop(router.peer.id, None)
        router.position = position
        self.routers[router.peer.id] = router

    def go_on(self, router: Router) -> None:
        """Give a router its turn, if it can be written to."""
        if router.queued or not router.peer.writable:
            return
        router.queued = True
        self._line.append(router)
        if self._turn is None:
            self._turn = self._loop.call_soon(self._take_turns)

    def close(self) -> None:
        """Send nothing more."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _take_turns(self) -> None:
        self._turn = None
        until = self._loop.time() + TURN
        for _ in range(len(self._line)):
            router = self._line.popleft()
            router.queued = False
            if router.peer.id in self.routers and router.peer.writable:
                self._advance(router)
                if router.peer.id in self.routers:
                    self.go_on(router)
            if self._loop.time() >= until:
                break
        if self._line and self._turn is None:
            self._turn = self._loop.call_soon(self._take_turns)

    def send_piece(self, router: Router, reader: Reading) -> None:
        """Send a router the next batch of its state, if it is made."""
        found = reader.next_batch()
        if found is not None:
            seq, payload = found
            transfer = reader.transfer
            frame = seq.to_bytes(8, "big") + transfer.publisher_id
            router.peer.write(encode_message((transfer.topic, frame, payload)))

    def _advance(self, router: Router) -> None:
        """Send a router the next piece of what it has not got."""
        reader = router.reader
        if reader is not None:
            self.send_piece(router, reader)
            if not reader.done:
                return
            router.reader = None
            router.slow = False
            router.lost_at = None
            router.state = RouterState.LIVE
            self._has_state(router)
        elif router.position < self._ring.end:
            data, router.position = self._ring.read(router.position, PIECE)
            router.peer.write(data)
        if router.position == self._ring.end and router.peer.writable:
            del self.routers[router.peer.id]
            self._current[router.peer.id] = router
            if not self.routers:
                self._ring.trim(self._ring.end)
