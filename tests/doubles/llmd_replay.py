"""llm-d's router with replay on, by the rules that it is known to keep: strict about every answer, and never in a hurry.

It is told apart from `StrictRouter` by what it does where that one fails: it forgets the pod and begins again from 0.
"""

from __future__ import annotations

from tests.doubles.router import PlainSetRouter
from tests.system.actors import GivenUpError, StrictRouter


class LlmdWithReplay(StrictRouter):
    """Asks from 0 at the beginning, and from the next seq on after a hole or a lost connection."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        super().__init__(endpoint, replay_endpoint, resumes=True)
        self.refused = 0
        """Answers that it did not take: what was known is forgotten."""
        self._late = 0
        self._begun = False

    async def read_on(self) -> set[int]:
        """Ask if there is a reason to, and take in the live stream; the hashes of all blocks."""
        try:
            if not self._begun or self.disconnected():
                self._begun = True
                await self.rebuild()
            await self.follow()
        except (AssertionError, ValueError):  # GivenUpError is one; so is a hole that a replay does not fill
            self._refuse()
        if self.late > self._late:  # an answer that begins later than asked for is refused as a whole
            self._late = self.late
            self._refuse()
        return {block for _, _, block in self.view.blocks if isinstance(block, int)}

    def _refuse(self) -> None:
        self._hang_up()
        self.refused += 1
        self.view, self.next = PlainSetRouter(), 0


__all__ = ["GivenUpError", "LlmdWithReplay"]
