"""The contract of output drivers: what a driver does, and which services of the daemon it may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvbus.config import OutputConfig
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Publish, SendState
from kvbus.core.events import RelayEvent
from kvbus.core.stats import OutputStats, RouterView
from kvbus.transport.interposed import Interposed
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.zmtp.endpoint import SYSTEM, System
from kvbus.transport.zmtp.protocol import DEFAULT, Limits


@dataclass(frozen=True, slots=True)
class Services:
    """The daemon's services for the driver of one output.

    Attributes:
        stats: counters of the output; the driver updates those of queues, drops and readers.
        feed: call it with each reader's request; :meth:`OutputDriver.answer` gets the answer.
        clock: seconds in which the process was running; it measures the progress of readers.
        max_replay_sessions: limit of answers at once, on all streams of the output.
        interposed: by endpoint, the ports at which engines dial in too; who opens or closes one keeps it here.
        publisher_limits: what such an engine may make kvbus keep.
        system: the operating system, for endpoints.
    """

    stats: OutputStats
    feed: Callable[[RelayEvent], None]
    clock: Callable[[], float]
    max_replay_sessions: int
    interposed: dict[str, Interposed] = field(default_factory=dict)
    publisher_limits: Limits = DEFAULT
    system: System = SYSTEM


class OutputDriver(Protocol):
    """The streams of one output, by slot. A driver never blocks, and no reader delays another.

    The daemon has committed the state before it calls :meth:`publish`, :meth:`answer` or :meth:`send_state`, and before
    it gives a message of an answer. So a driver may send at once, or later, without a look at the state.

    Batches of a stream leave in the order they are published. What is dropped is counted in ``stats`` with a reason:
    ``queue_full`` where ``queue_batches`` of them wait, another one where the driver has to let go for another cause.
    Reasons that a driver puts into a counter with 0 when it is made are shown from the start.
    What a stream adds to the gauges of ``stats``, its limits among them, is taken back when it closes.
    """

    def open(self, stream: int, topic: bytes, policy: PeerPolicy) -> None:
        """Serve one stream, whose topic is this one for now, to the readers that ``policy`` allows.

        Raises:
            BindError: an endpoint cannot be bound; nothing of the stream is left open.
        """

    def publish(self, command: Publish) -> None:
        """Queue one batch; the driver may wait for :meth:`flush`."""

    def flush(self) -> None:
        """Send the batches of this burst."""

    def answer(self, command: AnswerReplay | AnswerSnapshot, messages: Iterator[list[bytes]]) -> None:
        """Send the messages of an answer, and take each of them only when the requester can take it."""

    def send_state(self, command: SendState) -> None:
        """Send a state to the readers that a :class:`~kvbus.core.events.Subscribed` named, at their pace.

        A driver that feeds no such event has nothing to do here.
        """

    def allow(self, policy: PeerPolicy) -> bool:
        """Let the readers connect whose keys are on the list of ``policy`` now, and disconnect the others.

        Returns:
            False if the driver cannot, or has not to: then :meth:`reopen` is called if a key was withdrawn.
        """

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect every reader, and serve those that ``policy`` allows."""

    @property
    def routers(self) -> list[RouterView]:
        """The connected readers, and those that left last; none where the driver does not know its readers."""

    @property
    def queue_max(self) -> int:
        """The most batches that wait for one reader: for somebody who has all of them nothing waits."""

    @property
    def behind_seconds(self) -> float:
        """How long the oldest batch has been published that a connected reader has not got, and that it needs."""

    @property
    def streams(self) -> list[int]:
        """Slots of the open streams."""

    @property
    def busy(self) -> int:
        """Unfinished answers."""

    def end_answers(self) -> int:
        """Close unfinished answers with END, and count them.

        Returns:
            The number of unfinished answers.
        """

    def retire(self, stream: int) -> None:
        """Stop serving one stream for good: its source is gone, and so is its topic.

        A reader that is connected has to learn that nothing is left of it, however far behind it is.
        """

    def close(self, stream: int, linger: float = 0.0) -> None:
        """Stop serving one stream; queued messages have ``linger`` seconds to leave."""


OutputFactory = Callable[[int, OutputConfig, Services], OutputDriver]
"""The object of an entry point: it makes the driver of one output, by its index, and opens nothing yet."""


@runtime_checkable
class ViewDriver(OutputDriver, Protocol):
    """A driver whose readers may have limited rights: each reads the streams of its view in place of the output's own.

    Commands name a view by its number, as events do. Which view a reader has is in the policy of :meth:`allow`.
    """

    def open_view(self, number: int, stream: int, topic: bytes) -> None:
        """Serve one stream of a view; the output's own one is open."""

    def close_view(self, number: int, stream: int) -> None:
        """Stop serving one stream of a view, and disconnect its readers."""

    @property
    def views(self) -> list[tuple[int, int]]:
        """The streams of views that are served, with the views' numbers."""
