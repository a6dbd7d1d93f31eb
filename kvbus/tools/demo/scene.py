"""The scene: faults and events on the stage, and checks that the bus repairs them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from kvbus.tools.demo.engines import Casting, Engine
from kvbus.tools.demo.routers import Router
from kvbus.tools.demo.script import Act, Kind, plan
from kvbus.tools.demo.stage import Stage
from kvbus.tools.demo.story import Tone
from kvbus.tools.demo.verdict import counts
from kvbus.tools.demo.waiting import pause, until

TIMEOUT_S: Final = 10.0
"""Seconds that the bus may take for a repair before the demo reports a failure."""

_DOWNTIME_S: Final = 0.6
_HEARD_S: Final = 0.5  # for what is on its way to the direct router
_TAIL: Final = 3


class Scene(Stage):
    """A stage with a script: call `open`, `play`, `settle`, `verdict`, `close` in this order.

    Args:
        seconds: length of the demo, None for endless.
        seed: seed of the workload and the script.
        cast: the engines, by default `CAST`.
        script: the events, by default `plan`.
        curve: whether routers and bus talk over CURVE.
    """

    def __init__(
        self,
        *,
        seconds: float | None = None,
        seed: int = 0,
        cast: Sequence[Casting] | None = None,
        script: Iterable[Act] | None = None,
        curve: bool = False,
    ) -> None:
        super().__init__(seconds=seconds, seed=seed, cast=cast, curve=curve)
        self._script = script
        self._direct_has = counts([])

    async def play(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        """Play until the time is over or ``stop`` is set. Then the engines stop publishing."""
        early, late = self.routers
        quiet = asyncio.Event()
        for direct in self.direct:
            direct.join(group)
        for rank in self.ranks:
            await rank.connected(1 + len(self.direct), TIMEOUT_S)
        serving = [group.create_task(rank.serve(quiet), name=rank.label) for rank in self.ranks]
        early.join(group)
        names = ", ".join(engine.name for engine in self.engines)
        self.story.add(Tone.SCENE, f"{names} start; {early.name} reads kvbus, direct reads the engines")
        labels = [rank.label for rank in self.ranks]
        script = plan(labels, self._seconds, self._seed) if self._script is None else self._script
        for act in script:
            await pause(act.at - self.elapsed(), stop)
            if stop.is_set():
                break
            await self._perform(act, late, group, stop)
        await pause(float("inf") if self._seconds is None else self._seconds - self.elapsed(), stop)
        quiet.set()
        await asyncio.gather(*serving)
        if not stop.is_set():
            await self._lose_tail()

    async def settle(self) -> list[str]:
        """Wait until all routers have applied every published batch.

        Returns:
            What has not settled after `TIMEOUT_S`, as texts; empty if everything has.
        """
        took = await until(lambda: not self._unrest(), TIMEOUT_S)
        if took is None:
            return self._unrest()
        await until(self._heard, _HEARD_S)
        self.story.add(Tone.SCENE, "the engines are silent, and every batch has arrived")
        return []

    async def _perform(self, act: Act, late: Router, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        if act.kind is Kind.JOIN:
            await self._join(late, group)
        elif act.kind is Kind.CRASH:
            await self._crash(next(engine for engine in self.engines if engine.name == act.target), stop)
        else:
            i = [rank.label for rank in self.ranks].index(act.target)
            await (self._lose(i, act.count) if act.kind is Kind.LOSE else self._jumble(i, act.count))

    async def _lose(self, i: int, count: int) -> None:
        rank, before = self.ranks[i], self._source(i).counts.recovered
        self.story.add(Tone.FAULT, f"{count} live batches of {rank.label} are lost on their way")
        rank.lose(count)
        await until(lambda: not rank.misbehaving, TIMEOUT_S)
        took = await until(lambda: self._source(i).counts.recovered - before >= count and self._agree([i]), TIMEOUT_S)
        await self._report(
            took,
            f"gap seen, {count} replayed by the engine; all equal in {_s(took)}",
            f"the {count} lost batches of {rank.label} did not come back",
        )

    async def _jumble(self, i: int, count: int) -> None:
        rank, before = self.ranks[i], self._source(i).counts
        self.story.add(Tone.FAULT, f"{count} batches of {rank.label} are overtaken by others, {count} come twice")
        rank.jumble(count)
        await until(lambda: not rank.misbehaving, TIMEOUT_S)

        def mended() -> bool:
            now = self._source(i).counts
            return now.duplicates - before.duplicates >= count and self._agree([i])

        took = await until(mended, TIMEOUT_S)
        await self._report(
            took,
            f"order restored, doubles dropped; all equal in {_s(took)}",
            f"the order of {rank.label} was not restored",
        )

    async def _join(self, router: Router, group: asyncio.TaskGroup) -> None:
        if router.joined:
            await router.leave()
            self.story.add(Tone.FAULT, f"{router.name} restarts and has forgotten everything")
        else:
            sent = sum(rank.next_seq or 0 for rank in self.ranks)
            self.story.add(Tone.SCENE, f"{router.name} joins late, {sent} batches after the start")
        router.join(group)
        at = [index for index, router_ in enumerate(self.routers) if router_ is router]
        took = await until(lambda: router.rebuilt and self._agree(self._indexes(), at), TIMEOUT_S)
        await self._report(
            took,
            f"replayed {router.replayed} batches to it; {router.blocks:,} blocks equal in {_s(took)}",
            f"{router.name} could not be rebuilt",
        )

    async def _crash(self, engine: Engine, stop: asyncio.Event) -> None:
        mine = [i for i, rank in enumerate(self.ranks) if rank in engine.ranks]
        before = [self._source(i).epoch for i in mine]
        dead = sum(sum(self._source(i).blocks.values()) for i in mine)
        self.story.add(Tone.FAULT, f"{engine.name} crashes: its cache is gone, its seq begins at 0 again")
        await engine.crash(_DOWNTIME_S, stop)

        def learned() -> bool:
            epochs = [self._source(i).epoch for i in mine]
            return all(now > then for now, then in zip(epochs, before, strict=True)) and self._agree(mine)

        took = await until(learned, TIMEOUT_S)
        await self._report(
            took,
            f"new epoch: {dead:,} dead blocks cleared, all equal in {_s(took)}",
            f"the new epoch of {engine.name} was not noticed",
        )

    async def _lose_tail(self) -> None:
        """Lose the last batches: no later batch shows the gap."""
        rank, before = self.ranks[0], self._source(0).counts.recovered
        self.story.add(Tone.FAULT, f"the last {_TAIL} batches of {rank.label} are lost; none comes after them")
        rank.lose_tail(_TAIL)
        took = await until(lambda: self._source(0).counts.recovered - before >= _TAIL and self._agree([0]), TIMEOUT_S)
        await self._report(
            took,
            f"asked the silent engine: {_TAIL} missing; all equal in {_s(took)}",
            f"the last batches of {rank.label} were not missed",
        )

    async def _report(self, took: float | None, good: str, bad: str) -> None:
        if took is None:
            self.story.add(Tone.WRONG, f"{bad} within {TIMEOUT_S:.0f} s")
        else:
            self.story.add(Tone.BUS, good)
        await until(self._heard, _HEARD_S)
        for router in self.direct:
            found = counts([self._compared(router, i) for i in self._indexes()])
            if found != self._direct_has:
                self._direct_has = found
                self.story.add(Tone.DIRECT, found)


def _s(took: float | None) -> str:
    return "" if took is None else f"{took:.2f} s"
