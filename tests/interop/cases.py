"""The cases of the interop tests: one function for each row of the table in docs/INTEROP.md."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from .expected import DIRECT, THROUGH_KVBUS, Belief
from .scene import PATIENT, QUIET, running

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from .cache import Score
    from .routers import Kind
    from .scene import Scene

FULL: Final = 150
"""Number of batches in a case that fill the engine's cache and evict some blocks."""

LARGE: Final = 1000
"""Number of batches that fill a large cache. Its blocks are not evicted for a long time after a router joins."""

TURNING_SLOWLY: Final = {"cache": {"capacity": 3000, "batches": LARGE}}

IDLE: Final = 120.0


@dataclass(frozen=True)
class Case:
    """One row of the table in docs/INTEROP.md.

    Attributes:
        name: name of the row in `expected.py`.
        title: name of the row in the document.
        run: function that plays the case.
        short: whether the case is part of the ordinary test suite.
        seconds: approximate duration. The longest cases begin first.
        settings: arguments of `running`.
        state_dir: whether kvbus keeps its state on disk.
    """

    name: str
    title: str
    run: Callable[[Scene], Awaitable[None]]
    short: bool = False
    seconds: float = 5.0
    settings: dict[str, Any] = field(default_factory=dict)
    state_dir: bool = False


async def nothing() -> None:
    """Do nothing: a step for cases in which nothing happens while the routers are disconnected."""


async def from_start(scene: Scene) -> None:
    await scene.join()
    await scene.publish(FULL)


async def late(scene: Scene) -> None:
    await scene.publish(FULL)
    await scene.bus_has_all()
    await scene.join()


async def lost_connection(scene: Scene) -> None:
    await from_start(scene)
    await scene.settle()
    await scene.flap(nothing)


async def missed_five(scene: Scene) -> None:
    await from_start(scene)
    await scene.settle()
    await scene.flap(lambda: scene.publish(5))


async def cut(scene: Scene) -> None:
    await scene.publish(FULL)
    await scene.bus_has_all()
    await scene.join_and_be_cut()


async def idle(scene: Scene) -> None:
    await from_start(scene)
    await asyncio.sleep(IDLE)
    await scene.publish(5)


async def engine_restarts(scene: Scene) -> None:
    await from_start(scene)
    await scene.settle()
    await scene.restart_engine()
    await scene.publish(60)


async def lost_tail(scene: Scene) -> None:
    await from_start(scene)
    await scene.publish(20, lost=1)
    await scene.bus_has_all()


async def loss(scene: Scene) -> None:
    await scene.join()
    await scene.publish(2 * FULL, lost=0.05)
    await scene.publish(1)


async def bus_killed(scene: Scene) -> None:
    await from_start(scene)
    await scene.bus_has_all()
    await scene.kill_bus(lambda: scene.publish(20))
    await scene.publish(20)


async def router_restarts(scene: Scene) -> None:
    await from_start(scene)
    await scene.bus_has_all()
    await scene.restart_routers(lambda: scene.publish(5))


async def one_more(scene: Scene) -> None:
    await from_start(scene)
    await scene.bus_has_all()
    await scene.join()
    await scene.publish(20)


async def rank_restarts(scene: Scene) -> None:
    await from_start(scene)
    await scene.settle()
    await scene.restart_engine(1)
    await scene.publish(20)


async def long_stream(scene: Scene) -> None:
    await scene.publish(21_000)
    await scene.bus_has_all()
    await scene.join()


async def flow(scene: Scene) -> None:
    await scene.publish(LARGE)
    flowing = asyncio.ensure_future(scene.publish(LARGE // 2, rate=200))
    await scene.join()
    await flowing


CASES: Final = (
    Case("from_start", "the router runs from the start", from_start),
    Case("late", "the router joins late; the engine publishes nothing", late, short=True),
    Case(
        "high_numbers",
        "the router joins late; kvbus's seqs begin at 2,000,000",
        late,
        settings={"first_seq": 2_000_000},
    ),
    Case("lost_connection", "the router loses its connection; the engine publishes nothing meanwhile", lost_connection),
    Case("missed_five", "the router loses its connection and misses five batches", missed_five, short=True),
    Case(
        "cut",
        "the router joins late and loses its connection in the middle of the state (9,000 blocks)",
        cut,
        settings={"cache": {"capacity": 9000}},
        seconds=30.0,
    ),
    Case("idle", "the engine publishes nothing for 120 s", idle, seconds=IDLE),
    Case("engine_restarts", "the engine restarts", engine_restarts),
    Case("lost_tail", "the last 20 batches are lost on the live stream", lost_tail),
    Case("loss", "5 % of the batches are lost on the live stream", loss),
    Case("bus_killed", "kvbus without `state_dir` is killed, and starts again after 20 batches", bus_killed),
    Case(
        "bus_killed_state",
        "kvbus with `state_dir` is killed, and starts again after 20 batches",
        bus_killed,
        state_dir=True,
    ),
    Case("router_restarts", "the router restarts; the engine publishes five batches meanwhile", router_restarts),
    Case("one_more", "a second router joins; the cells count the blocks of both routers", one_more),
    Case(
        "rank_restarts",
        "one of three ranks restarts; each rank has its own stream",
        rank_restarts,
        settings={"ranks": 3},
    ),
    Case(
        "rank_merged",
        "one of three ranks restarts; all ranks share one stream",
        rank_restarts,
        settings={"ranks": 3, "layout": "merged"},
    ),
    Case("long", "the router joins after 21,000 batches", long_stream, seconds=30.0),
    Case(
        "flow",
        "the router joins while the engine publishes 200 batches a second (3,000 blocks)",
        flow,
        settings=TURNING_SLOWLY,
    ),
)
"""All interop cases, in the order of the rows in docs/INTEROP.md."""


async def play(case: Case, kind: Kind, directory: Path) -> tuple[int, Score, Score]:
    """Play a case.

    Return the engine's number of blocks, the score of the router at the engine, and the score of the router at kvbus.
    """
    settings = dict(case.settings)
    if case.state_dir:
        settings["state_dir"] = str(directory / "state")
    async with running(kind, directory, **settings) as scene:
        await case.run(scene)
        expected = (side[kind.name].get(case.name, Belief.EXACT) for side in (DIRECT, THROUGH_KVBUS))
        direct, behind = await scene.scores(*(PATIENT if each is Belief.EXACT else QUIET for each in expected))
        return len(scene.live), direct, behind
