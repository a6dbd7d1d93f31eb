"""The two routers of the exhaustive search.

The checking router requests replays and checks seqs; the trusting router does neither.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.doubles.router import PlainSetRouter, events_of
from tests.exhaustive.bus import Batch, Bus


class Router:
    """A router's set of blocks, and whether the router is connected."""

    def __init__(self) -> None:
        self.connected = False
        self.next = 0
        self.view = PlainSetRouter()

    @property
    def blocks(self) -> set[int]:
        return {block for *_, block in self.view.blocks if isinstance(block, int)}

    def apply(self, seq: int, payload: bytes) -> None:
        assert seq == self.next, f"a router got {seq} where {self.next} was due"
        self.next = seq + 1
        self.view.take(seq, payload)
        assert self.view.violations == [], f"a router got what no stream may hold: {self.view.violations}"


class Checking(Router):
    """A router that requests a replay when it subscribes and at each gap. Live batches wait while it reads the answer.

    If it has nothing to request, it reads each batch immediately. Only a stalled router keeps batches in its queue.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Batch] = deque()
        self.answer: Any = None
        self.wants = False
        """Whether the router will request a replay next."""
        self.stalled = False

    @property
    def idle(self) -> bool:
        """Whether the router has nothing to read and nothing to request."""
        return self.connected and not self.queue and self.answer is None and not self.wants

    def subscribe(self) -> None:
        self.connected = self.wants = True

    def leave(self) -> None:
        self.queue.clear()
        self.answer = None
        self.connected = self.wants = self.stalled = False

    def published(self, seq: int, payload: bytes) -> None:
        if self.connected:
            self.queue.append((seq, payload))
            self.read_live()

    def read_live(self) -> None:
        while self.queue and not self.wants and self.answer is None and not self.stalled:
            seq, payload = self.queue[0]
            if seq > self.next:
                self.wants = True
                return
            self.queue.popleft()
            if seq == self.next:
                self.apply(seq, payload)

    def ask(self, bus: Bus, now: float) -> None:
        self.answer, self.wants = bus.asked(self.next, now), False

    def read_answer(self, bus: Bus) -> None:
        batch = bus.answer(self.answer)
        if batch is None:
            self.answer = None
            self.read_live()
        else:
            seq, payload = batch
            if not self.next and seq:
                assert events_of(payload)[0]["type"] == "AllBlocksCleared", "an answer begins late without a clear"
                self.next = seq
            self.apply(seq, payload)

    def break_answer(self) -> None:
        self.answer, self.wants = None, True


class Trusting(Router):
    """A router that applies every batch immediately, and replaces its blocks by each new state.

    The order of its reads is not part of the search.
    """

    def subscribe(self, bus: Bus, now: float) -> None:
        batches = bus.subscribed(now)
        assert events_of(batches[0][1])[0]["type"] == "AllBlocksCleared", "a state does not begin with a clear"
        self.next = batches[0][0]
        for batch in batches:
            self.apply(*batch)
        self.connected = True

    def leave(self) -> None:
        self.connected = False

    def published(self, seq: int, payload: bytes) -> None:
        if self.connected:
            self.apply(seq, payload)
