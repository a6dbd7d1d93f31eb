"""The player, which publishes the batches of a capture as the recorded engine did, with faults if requested.

The player keeps the seqs of the capture. If a seq is lower than the one before it, the engine had restarted. The player
then closes its sockets, opens them again, and empties the replay buffer. `schedule` chooses the faults. It does no I/O
and has a seed, so that a failed run can be repeated.
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


_LINGER: Final = 0.2  # seconds that closing sockets get to send the last batches of an epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The probability of each fault for a batch, from 0 to 1.

    Attributes:
        drop: the batch is buffered for replays, but not sent live.
        duplicate: the batch is sent live twice.
        swap: the batch is sent live after the next batch.
        hole: the batch is neither sent nor buffered, so no replay has its seq.
        seed: seed of the random numbers that choose the faulty batches.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    swap: float = 0.0
    hole: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """A step of the player: restart the publisher as an engine does."""


@dataclass(frozen=True, slots=True)
class Publish:
    """A step of the player: buffer a batch for replays and, if ``live`` is true, send it."""

    message: Message
    live: bool = True


@dataclass(frozen=True, slots=True)
class Again:
    """A step of the player: send a batch live that is already in the replay buffer.

    The batch is then late (sent after later batches), or is sent twice.
    """

    seq: int


Step = Restart | Publish | Again


@dataclass(slots=True)
class Stats:
    """The counters of a player: epochs, published batches, and batches with each kind of fault."""

    epochs: int = 1
    published: int = 0
    dropped: int = 0
    duplicated: int = 0
    swapped: int = 0
    holes: int = 0


def schedule(messages: Iterable[Message], faults: Faults, stats: Stats) -> Iterator[Step]:
    """Yield the steps with which the player publishes `messages`.

    `faults` has the probability of each fault. The chosen faults are counted in `stats`.
    """
    rng = random.Random(faults.seed)  # noqa: S311 - repeatable on purpose
    last = -1
    late: int | None = None  # seq of a swapped batch, which is sent after the next batch

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
    """Publish the messages of a capture, with faults if requested.

    Args:
        publisher: a started publisher.
        read: function that returns the messages of the capture. It is called again for each repetition.
        pace: ``rate`` for a fixed rate, ``recorded`` for the times in the capture.
        rate: batches per second at a fixed rate.
        speed: factor by which the recorded pace is sped up.
        loop: whether to repeat the capture for ever, each time as a new epoch of the engine. `play` then never returns.
        faults: probabilities of the faults. Each repetition has its own seed.
        subscribers: number of subscribers to wait for at the start of each epoch, so that they miss no batch.
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
    """Yield each step of the player at the time at which it is to be carried out.

    Only a `Publish` step has its own time. Each other step follows the step before it without delay.
    """
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
            # Do not wait for less than a millisecond, because the timer of the event loop has that resolution. Batches
            # that are due within a millisecond are sent together.
            early = due - loop.time()
            await asyncio.sleep(early if early > 0.001 else 0)
            if rate is not None:
                due = max(due + 1 / rate, loop.time() - 1)
        yield step
