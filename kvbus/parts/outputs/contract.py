"""The contract of output drivers: what a driver has to do, and which services of the daemon it may use."""

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
        stats: the counters of the output. The driver updates those of queues, drops and readers.
        feed: feeds a reader's request to the relay. The answer comes to :meth:`OutputDriver.answer`.
        clock: returns the seconds for which the process has been running. Time in which it was stopped does not count.
            The driver measures the progress of readers with it.
        max_replay_sessions: maximum number of answers at once, on all streams of the output.
        interposed: by endpoint, the ports that engines dial, too. The driver adds a port when it opens it, and removes
            it when it closes it.
        publisher_limits: limits for the messages of such an engine.
        system: the operating system's services for endpoints.
    """

    stats: OutputStats
    feed: Callable[[RelayEvent], None]
    clock: Callable[[], float]
    max_replay_sessions: int
    interposed: dict[str, Interposed] = field(default_factory=dict)
    publisher_limits: Limits = DEFAULT
    system: System = SYSTEM


class OutputDriver(Protocol):
    """The driver of one output, which serves the output's streams by slot.

    A driver never blocks, and no reader delays another one.

    The daemon has committed the state before it calls :meth:`publish`, :meth:`answer` or :meth:`send_state`, and before
    it yields a message of an answer. So a driver may send at once or later, and does not have to check the state.

    The batches of a stream are sent in the order in which they were published. A dropped batch is counted in ``stats``
    with a reason. The reason is ``queue_full`` if ``queue_batches`` batches were waiting, and another one if the driver
    drops batches for another cause. A reason is shown from the start if the driver puts it into a counter with 0 when
    it is made. When a stream closes, the driver takes back what the stream has added to the gauges of ``stats``,
    including its limits.
    """

    def open(self, stream: int, topic: bytes, policy: PeerPolicy) -> None:
        """Start serving one stream to the readers that ``policy`` allows. ``topic`` is the stream's topic for now.

        Raises:
            BindError: an endpoint cannot be bound. Nothing of the stream is then left open.
        """

    def publish(self, command: Publish) -> None:
        """Queue one batch. The driver may send it only at the next :meth:`flush`."""

    def flush(self) -> None:
        """Send the batches of this burst."""

    def answer(self, command: AnswerReplay | AnswerSnapshot, messages: Iterator[list[bytes]]) -> None:
        """Send the messages of an answer.

        Take each message from the iterator only when the requester can receive it.
        """

    def send_state(self, command: SendState) -> None:
        """Send a state to the readers named in a :class:`~kvbus.core.events.Subscribed`, as fast as they read.

        A driver that never feeds such an event does nothing here.
        """

    def allow(self, policy: PeerPolicy) -> bool:
        """Replace the list of allowed keys by that of ``policy``, and disconnect the readers whose keys are not on it.

        Returns:
            False if the driver cannot do this, or does not need to. The daemon then calls :meth:`reopen` if a key was
                withdrawn.
        """

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect all readers, and serve the readers that ``policy`` allows."""

    @property
    def routers(self) -> list[RouterView]:
        """The connected readers and those that left last; empty if the driver does not know its readers."""

    @property
    def queue_max(self) -> int:
        """Maximum number of batches that wait for one reader; 0 if every reader has all batches."""

    @property
    def behind_seconds(self) -> float:
        """Age in seconds of the oldest batch that a connected reader lacks and needs."""

    @property
    def streams(self) -> list[int]:
        """Slots of the open streams."""

    @property
    def busy(self) -> int:
        """Number of unfinished answers."""

    def end_answers(self) -> int:
        """Close unfinished answers with END, and count them in ``stats``.

        Returns:
            The number of unfinished answers.
        """

    def retire(self, stream: int) -> None:
        """Stop serving one stream for good, because its source and its topic are gone.

        The driver has to tell connected readers that the stream has no blocks left, even if they are far behind.
        """

    def close(self, stream: int, linger: float = 0.0) -> None:
        """Stop serving one stream. Send its queued messages for up to ``linger`` seconds."""


OutputFactory = Callable[[int, OutputConfig, Services], OutputDriver]
"""The type of an entry point's object: it makes the driver of one output, given its index. It opens nothing."""


@runtime_checkable
class ViewDriver(OutputDriver, Protocol):
    """A driver whose readers may have limited rights.

    A reader with limited rights reads the streams of its view instead of the output's own streams. Commands and events
    name a view by its number. The policy of :meth:`allow` says which view a reader has.
    """

    def open_view(self, number: int, stream: int, topic: bytes) -> None:
        """Start serving one stream of a view. The output's own stream in this slot is open."""

    def close_view(self, number: int, stream: int) -> None:
        """Stop serving one stream of a view, and disconnect its readers."""

    @property
    def views(self) -> list[tuple[int, int]]:
        """The open streams of views, each as the view's number and the stream's slot."""
