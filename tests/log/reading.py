"""A log reader for tests: kvbus's follower of a stream, and the blocks that result from its steps."""

from __future__ import annotations

from kvbus.parts.log.follower import Follower, Holds
from kvbus.parts.log.record import Kind
from tests.doubles.router import PlainSetRouter


class Reading:
    """kvbus's follower of one stream, the blocks that result from its steps, and the epochs and seqs of its records."""

    def __init__(self) -> None:
        self.follower = Follower()
        self.view = PlainSetRouter()
        self.given: list[tuple[int, int]] = []

    @property
    def blocks(self) -> set[int | bytes]:
        return {block for *_, block in self.view.blocks}

    def take(self, *records: bytes, now: float = 0.0) -> set[int | bytes]:
        for data in records:
            step = self.follower.follow(data, now)
            if step is not None and not step.known:
                found = step.record
                self.given.append((found.epoch, found.seq))
                if found.kind is not Kind.GONE:
                    self.view.take(found.seq, found.payload)
            self._clear_if_void()
        return self.blocks

    def wait(self, now: float) -> None:
        """Tell the follower that no record has come until the time ``now``."""
        self.follower.expire(now)
        self._clear_if_void()

    def _clear_if_void(self) -> None:
        if self.follower.holds is Holds.NOTHING:
            self.view.blocks.clear()
