"""Requests to a publisher's replay and snapshot endpoints, as readers send them and as they should not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from kvbus.tools.conform.engine.answers import LONG, Answer
from kvbus.tools.conform.engine.events import EventReader
from kvbus.tools.conform.engine.judge import EngineJudge
from kvbus.tools.conform.engine.ledger import Ledger
from kvbus.tools.conform.verdict import Evidence
from kvbus.transport.client.asker import Asker

if TYPE_CHECKING:
    from kvbus.transport.curve import Curve

TIMEOUT: Final = 10.0
"""Seconds for the next message of an answer."""
_SHORT: Final = 3.0
"""Seconds for an answer that need not come."""
_SILENT: Final = 8
"""Requesters that do not read."""
_HOLD_S: Final = 1.0
_BEYOND: Final = 2**40
"""Added to a number: nothing was sent there."""
_MOST_FRAMES: Final = 1_000_000


class Asking:
    """Asks, and judges what comes.

    Args:
        judge: what is seen goes there.
        replay: the replay endpoint, None for none.
        snapshot: the snapshot endpoint, None for none.
        curve: keys.
    """

    def __init__(self, judge: EngineJudge, replay: str | None, snapshot: str | None, curve: Curve | None) -> None:
        self._judge = judge
        self._replay = replay
        self._snapshot = snapshot
        self._curve = curve

    async def ask(self, start: int) -> Answer | None:
        """Ask for a replay, and judge the answer; None where there is no replay endpoint."""
        if self._replay is None:
            return None
        answer = Answer(start)
        async with Asker(self._replay, curve=self._curve) as asker:
            asker.ask(b"", start.to_bytes(8, "big"))
            await self._read(asker, answer, TIMEOUT)
        self._judge.answer(answer)
        return answer

    async def probe(self, heard: Callable[[], int]) -> None:
        """Try what readers do not do every day. ``heard``: how many live batches have come."""
        if self._replay is None:
            return
        before = heard()
        beyond = (self._judge.stream.expected or 0) + _BEYOND
        await self.ask(beyond)
        whole = await self.ask(0)
        if during := heard() - before:
            self._judge.ledger.kept("1.4", during)
        await self._without_delimiter(beyond)
        if whole is not None and len(whole.messages) > LONG:
            await self._beside_silent_ones()

    async def _without_delimiter(self, start: int) -> None:
        assert self._replay is not None  # noqa: S101 - asked before
        answer = Answer(start, delimited=False)
        async with Asker(self._replay, curve=self._curve) as asker:
            asker.ask(start.to_bytes(8, "big"))
            await self._read(asker, answer, _SHORT)
        if not answer.messages:
            self._judge.ledger.broken("4.1", f"a request without the empty frame got no answer in {_SHORT:g} s")
        elif answer.ended and len(answer.messages[-1]) <= 3:
            self._judge.ledger.kept("4.1")
        else:
            shown = [Evidence(f"frame {at}", frame) for at, frame in enumerate(answer.messages[-1][:4])]
            self._judge.ledger.broken("4.1", "a request without the empty frame was not answered in kind", *shown)

    async def _beside_silent_ones(self) -> None:
        """Some ask and do not read; one asks and reads; then one of the silent ones reads after all."""
        assert self._replay is not None  # noqa: S101 - asked before
        async with AsyncExitStack() as stack:
            silent = []
            for _ in range(_SILENT):
                asker = await stack.enter_async_context(Asker(self._replay, curve=self._curve, slow=True))
                asker.ask(b"", bytes(8))
                silent.append(asker)
            await asyncio.sleep(_HOLD_S)
            healthy = await self.ask(0)
            if healthy is not None and healthy.ended:
                self._judge.ledger.kept("4.8")
            else:
                self._judge.ledger.broken("4.8", f"beside {_SILENT} silent requesters an answer had no END")
            answer = Answer(0, slow=True)
            await self._read(silent[0], answer, TIMEOUT)
            self._judge.answer(answer)

    async def snapshot(self) -> None:
        """Ask for a snapshot, and judge its form."""
        if self._snapshot is None:
            return
        ledger = self._judge.ledger
        async with Asker(self._snapshot, curve=self._curve, most=_MOST_FRAMES) as asker:
            asker.ask(b"snapshot")
            try:
                frames = await asyncio.wait_for(asker.recv(), TIMEOUT)
            except TimeoutError:
                ledger.broken("5.5", f"a request for a snapshot got no answer in {TIMEOUT:g} s")
                return
        body = frames[1:] if frames[0] == b"" else frames
        shown = [Evidence(f"frame {at}", frame) for at, frame in enumerate(frames[:3])]
        if len(body) < 2 or len(body[0]) != 8 or len(body[1]) != 16:
            ledger.broken("5.5", "a snapshot does not begin with a number of 8 bytes and an id of 16", *shown)
            return
        number = int.from_bytes(body[0], "big", signed=True)
        first = EventReader(Ledger()).read(body[2], number) if len(body) > 2 else None
        if number >= 0 and (first is None or not first.clears_first):
            ledger.broken("5.5", "the batches of a snapshot do not begin with AllBlocksCleared", *shown)
        elif number < -2:
            ledger.broken("5.5", f"a snapshot has the number {number}", *shown)
        else:
            ledger.kept("5.5")

    @staticmethod
    async def _read(asker: Asker, answer: Answer, seconds: float) -> None:
        """Read until END, or until nothing comes for so many seconds."""
        try:
            while not answer.add(await asyncio.wait_for(asker.recv(), seconds)):
                pass
        except TimeoutError:
            return
