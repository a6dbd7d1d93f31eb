"""Publish a capture as the engine would that it was recorded from.

The capture's own sequence numbers are used. Where they go back, the engine was restarted: sockets close and
open again, the replay buffer is empty. Faults are decided by `schedule`, which is pure and seeded, so that
a run that went wrong can be played again.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from kvbus.capture.format import Message
    from kvbus.transport.engine.publisher import EnginePublisher


_LINGER: Final = 0.2  # seconds that the last batches of a life have to reach the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How likely each fault is, a batch.

    Attributes:
        drop: buffered for replay, but not sent live.
        duplicate: sent live twice.
        swap: sent live after the batch that follows it.
        hole: never sent and never buffered, though its seq is used up: no replay brings it back.
        seed: the same seed gives the same faults.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    swap: float = 0.0
    hole: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """The engine dies and comes back."""


@dataclass(frozen=True, slots=True)
class Publish:
    """A batch is published."""

    message: Message
    live: bool = True


@dataclass(frozen=True, slots=True)
class Again:
    """A batch published before is sent live (once more)."""

    seq: int


Step = Restart | Publish | Again


@dataclass(slots=True)
class Stats:
    """What was played."""

    lives: int = 1
    published: int = 0
    dropped: int = 0
    duplicated: int = 0
    swapped: int = 0
    holes: int = 0


def schedule(messages: Iterable[Message], faults: Faults, stats: Stats) -> Iterator[Step]:
    """Yield what a publisher has to do to play `messages`, counting it in `stats`."""
    rng = random.Random(faults.seed)  # noqa: S311 - repeatable on purpose
    last = -1
    late: int | None = None  # a swapped batch that waits for the next one

    def overtaken() -> Iterator[Step]:
        nonlocal late
        if late is not None:
            yield Again(late)
            late = None

    for message in messages:
        if message.seq < last:
            yield from overtaken()
            stats.lives += 1
            yield Restart()
        last = message.seq
        if rng.random() < faults.hole:
            stats.holes += 1
            continue
        stats.published += 1
        if rng.random() < faults.drop:
            stats.dropped += 1
            yield Publish(message, live=False)
            yield from overtaken()
            continue
        if late is None and rng.random() < faults.swap:
            stats.swapped += 1
            late = message.seq
            yield Publish(message, live=False)
            continue
        yield Publish(message)
        yield from overtaken()
        if rng.random() < faults.duplicate:
            stats.duplicated += 1
            yield Again(message.seq)
    yield from overtaken()


async def play(
    publisher: EnginePublisher,
    read: Callable[[], Iterable[Message]],
    *,
    pace: Literal["rate", "recorded"] = "rate",
    rate: float = 200.0,
    speed: float = 1.0,
    loop: bool = False,
    faults: Faults | None = None,
    subscribers: int = 0,
    stats: Stats | None = None,
) -> Stats:
    """Publish a capture.

    Args:
        publisher: where to, started.
        read: opens the capture; called once a loop.
        pace: ``rate`` for a fixed number of batches a second, ``recorded`` for the times in the capture.
        rate: batches a second.
        speed: how much faster than recorded.
        loop: begin again at the end, each time as a new life of the engine; never returns.
        faults: faults to make; each loop has its own.
        subscribers: how many to wait for at the start of each life, so that they miss nothing of it.
        stats: counters to update while playing.

    Returns:
        What was played.

    Raises:
        CaptureError: the capture cannot be read.
    """
    faults = faults or Faults()
    stats = stats or Stats()
    round_ = 0
    await publisher.wait_for_subscriber(count=subscribers)
    while True:
        seeded = replace(faults, seed=faults.seed + round_)
        steps = schedule(read(), seeded, stats)
        async for step in _paced(steps, None if pace == "recorded" else rate, speed):
            if isinstance(step, Publish):
                publisher.publish(step.message.payload, seq=step.message.seq, live=step.live)
            elif isinstance(step, Again):
                publisher.send_again(step.seq)
            else:
                publisher.restart(linger=_LINGER)
                await publisher.wait_for_subscriber(count=subscribers)
        if not loop:
            return stats
        round_ += 1
        stats.lives += 1
        publisher.restart(linger=_LINGER)
        await publisher.wait_for_subscriber(count=subscribers)


async def _paced(steps: Iterator[Step], rate: float | None, speed: float) -> AsyncIterator[Step]:
    """Yield each step when it is due; a batch takes time, everything else happens with it."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    due = start
    origin: float | None = None
    for step in steps:
        if isinstance(step, Publish):
            if rate is None:
                if origin is None:
                    origin = step.message.t
                due = start + (step.message.t - origin) / speed
            # a few batches at a time: the loop's timer is no finer than a millisecond
            early = due - loop.time()
            await asyncio.sleep(early if early > 0.001 else 0)
            if rate is not None:
                due = max(due + 1 / rate, loop.time() - 1)
        yield step
