"""Publish a capture as its engine did.

The player keeps the capture's sequence numbers. Where they go back, the engine had restarted: the player closes its
sockets, opens them again, and empties the replay buffer. `schedule` decides the faults. It is pure and seeded, so that
a failed run can be repeated.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from kvbus.tools.capture.format import Message
    from kvbus.transport.engine.publisher import EnginePublisher


_LINGER: Final = 0.2  # seconds for the last batches of an epoch to reach the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probability of each fault per batch, from 0 to 1.

    Attributes:
        drop: buffered for replay, but not sent live.
        duplicate: sent live twice.
        swap: sent live after the next batch.
        hole: neither sent nor buffered, though its seq is used up: no replay has it.
        seed: seed of the faults.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    swap: float = 0.0
    hole: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """The engine restarts."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish a batch."""

    message: Message
    live: bool = True


@dataclass(frozen=True, slots=True)
class Again:
    """Send an earlier batch live, late or once more."""

    seq: int


Step = Restart | Publish | Again


@dataclass(slots=True)
class Stats:
    """Counters of a player."""

    epochs: int = 1
    published: int = 0
    dropped: int = 0
    duplicated: int = 0
    swapped: int = 0
    holes: int = 0


def schedule(messages: Iterable[Message], faults: Faults, stats: Stats) -> Iterator[Step]:
    """Yield the steps of a publisher that plays `messages`, and count them in `stats`."""
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
            stats.epochs += 1
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
        publisher: the publisher, started.
        read: opens the capture; called once per loop.
        pace: ``rate`` for a fixed rate, ``recorded`` for the times in the capture.
        rate: batches per second.
        speed: factor on the recorded pace.
        loop: begin again at the end, each time as a new epoch of the engine; then `play` never returns.
        faults: faults to make; each loop has its own seed.
        subscribers: subscribers to wait for at the start of each epoch, so that they miss none of its batches.
        stats: counters to update while playing.

    Returns:
        The counters.

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
        stats.epochs += 1
        publisher.restart(linger=_LINGER)
        await publisher.wait_for_subscriber(count=subscribers)


async def _paced(steps: Iterator[Step], rate: float | None, speed: float) -> AsyncIterator[Step]:
    """Yield each step when it is due. Only batches take time."""
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
            # the loop's timer is no finer than a millisecond, so a few batches may leave together
            early = due - loop.time()
            await asyncio.sleep(early if early > 0.001 else 0)
            if rate is not None:
                due = max(due + 1 / rate, loop.time() - 1)
        yield step
