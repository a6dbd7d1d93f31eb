"""llm-d's router with replay on, by the rules that it is known to keep: strict about every answer.

It differs from `StrictRouter` in what it does where that one fails: it forgets the pod and begins again from 0. An answer
to a request from 0 may be empty; then the next live batch is the first one, whatever its number.
"""

from __future__ import annotations

from tests.doubles.router import PlainSetRouter
from tests.system.actors import StrictRouter


class LlmdWithReplay(StrictRouter):
    """Asks from 0 at the beginning, and from the next seq on after a hole or a lost connection."""

    rebuilds = False

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        super().__init__(endpoint, replay_endpoint, resumes=True)
        self.refused = 0
        """Answers that were not what was asked for: what was known is forgotten."""
        self._late = 0
        self._begun = False
        self._anywhere = False

    async def read_on(self) -> set[int]:
        """Ask if there is a reason to, and take in the live stream; the hashes of all blocks."""
        try:
            if not self._begun or self.disconnected():
                self._begun = True
                await self.rebuild()
            await self.follow()
        except AssertionError:  # it gave up, or a hole was not filled
            self._refuse()
        return {block for _, _, block in self.view.blocks if isinstance(block, int)}

    async def rebuild(self) -> None:
        start, self._anywhere = self.next, False
        await super().rebuild()
        self._anywhere = start == self.next == 0
        if self.late > self._late:
            self._late = self.late
            raise AssertionError(f"an answer that begins later than {start}")

    def _hold(self) -> None:
        super()._hold()
        if self._anywhere and self._held:
            self._anywhere = False
            self.next = self._held[0][0]

    def _refuse(self) -> None:
        self._hang_up()
        self.refused += 1
        self.view, self.next = PlainSetRouter(), 0
        self._begun = False
