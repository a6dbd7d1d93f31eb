"""What a driver of an output type has to do, and what it may use of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbus.config import OutputConfig
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Publish
from kvbus.core.events import RelayEvent
from kvbus.core.stats import OutputStats
from kvbus.transport.sockets import Context, PeerPolicy


@dataclass(frozen=True, slots=True)
class Services:
    """What the daemon lends to the driver of one output.

    Attributes:
        stats: counters of the output; the driver keeps those of queues, drops and readers.
        feed: takes requests of readers; answers come back through :meth:`OutputDriver.answer`.
        before_send: called before anything leaves, for what follows from a state is written before it; None where no
            state is kept.
        clock: seconds in which the process was running, for readers that make no progress.
        context: the process's ZeroMQ context, for drivers that speak it.
        max_replay_sessions: answers under way at once, on all streams of the output.
    """

    stats: OutputStats
    feed: Callable[[RelayEvent], None]
    before_send: Callable[[], None] | None
    clock: Callable[[], float]
    context: Context
    max_replay_sessions: int


class OutputDriver(Protocol):
    """One output's streams, named by their place. It never blocks, and never lets one reader delay another.

    Batches of a stream leave in the order they are published. What is dropped is counted in ``stats`` with a reason:
    ``queue_full`` where ``queue_batches`` of them wait, another one where the driver has to let go for another cause.
    What a stream adds to the gauges of ``stats``, its limits among them, is taken back when it closes.
    """

    def open(self, stream: int, policy: PeerPolicy) -> None:
        """Serve one stream, to those whom ``policy`` lets in.

        Raises:
            BindError: it cannot be served; nothing of it is left open.
        """

    def publish(self, command: Publish) -> None:
        """Take one batch; it may wait for :meth:`flush`."""

    def flush(self) -> None:
        """The burst at hand is over: send what it gave."""

    def answer(self, command: AnswerReplay | AnswerSnapshot) -> None:
        """Send an answer, at the pace of whoever asked."""

    def reopen(self, policy: PeerPolicy) -> None:
        """Cut every reader off, and let those in whom ``policy`` lets in."""

    @property
    def streams(self) -> list[int]:
        """The streams that are open."""

    @property
    def busy(self) -> int:
        """Answers that are not sent whole."""

    def end_answers(self) -> int:
        """Cut off the answers under way, tell whoever waits for them, and count them; how many they were."""

    def close(self, stream: int, linger: float = 0.0) -> None:
        """Serve one stream no longer; what is queued has ``linger`` seconds to leave."""


OutputFactory = Callable[[int, OutputConfig, Services], OutputDriver]
"""What an entry point names: makes the driver of the output with this place, which opens nothing yet."""
