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
from kvbus.transport.unsent import UNLIMITED, Unsent
from kvbus.transport.zmtp.protocol import DEFAULT, Limits
from kvbus.transport.zmtp.settings import SYSTEM, System


@dataclass(frozen=True, slots=True)
class Services:
    """The daemon's services for the driver of one output.

    Attributes:
        stats: the counters and gauges of the output. The driver updates those of queues, drops and readers.
        feed: function that passes a reader's request to the relay. The relay's answer comes to
            :meth:`OutputDriver.answer`.
        clock: function that returns the seconds for which the process has been running. Time in which the process was
            stopped does not count. The driver measures with it whether readers make progress.
        max_replay_sessions: maximum number of answers that are sent at the same time, on all streams of the output.
        interposed: the ports to which engines connect as well as routers, by endpoint. The driver adds a port when it
            opens the port, and removes it when it closes the port.
        publisher_limits: limits for the messages of the engines that connect to these ports.
        system: the functions of the operating system that endpoints use.
        unsent: the limit for the bytes that wait in kvbus for the readers of all outputs together.
    """

    stats: OutputStats
    feed: Callable[[RelayEvent], None]
    clock: Callable[[], float]
    max_replay_sessions: int
    interposed: dict[str, Interposed] = field(default_factory=dict)
    publisher_limits: Limits = DEFAULT
    system: System = SYSTEM
    unsent: Unsent = UNLIMITED


class OutputDriver(Protocol):
    """The driver of one output.

    It serves the output's streams. Each stream has a number, its slot.

    A driver never blocks, and no reader delays another reader.

    Before the daemon calls :meth:`publish`, :meth:`answer` or :meth:`send_state`, and before it yields a message of an
    answer, it has committed the relay's state to disk. So a driver may send immediately.

    The batches of a stream are sent in the order in which they were published. A dropped batch is counted in ``stats``
    with a reason. The reason is ``queue_full`` if ``queue_batches`` batches were waiting. A driver may have further
    reasons. If it sets the counter of a reason to 0 when it is constructed, the metrics show the reason from the start.
    When a stream closes, the driver subtracts from the gauges of ``stats`` what it has added for this stream. This
    includes the gauges that show limits, such as ``queue_limit``.
    """

    def open(self, stream: int, topic: bytes, policy: PeerPolicy) -> None:
        """Start serving one stream.

        Args:
            stream: the slot of the stream.
            topic: the topic of the stream when it is opened. A later batch may have another topic.
            policy: the readers that may connect.

        Raises:
            BindError: an endpoint cannot be bound. The driver has closed everything that it had opened for the stream.
        """

    def publish(self, command: Publish) -> None:
        """Queue one batch. The driver may wait until the next :meth:`flush` before it sends the batch."""

    def flush(self) -> None:
        """Send the batches that were queued since the last flush."""

    def answer(self, command: AnswerReplay | AnswerSnapshot, messages: Iterator[list[bytes]]) -> None:
        """Send the messages of an answer to the reader that has sent the request.

        ``messages`` creates each message when it is taken. So take a message only when the reader can receive it.
        """

    def send_state(self, command: SendState) -> None:
        """Send a stream's state to readers, as fast as they read.

        They are the readers that the driver has named in a :class:`~kvbus.core.events.Subscribed` event. A driver that
        never feeds such an event does nothing here.
        """

    def allow(self, policy: PeerPolicy) -> bool:
        """Replace the list of CURVE keys whose owners may connect.

        Disconnect the readers whose keys are not on the new list.

        Returns:
            False if the driver cannot do this, or does not need to. The daemon then calls :meth:`reopen` if the new
                list lacks a key of the old list.
        """

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect all readers, and from then on serve the readers that ``policy`` allows."""

    @property
    def routers(self) -> list[RouterView]:
        """The connected and the most recently disconnected readers; empty if the driver does not know its readers."""

    @property
    def queue_max(self) -> int:
        """Number of batches that wait for the reader with the longest queue; 0 if every reader has all batches."""

    @property
    def behind_seconds(self) -> float:
        """Age in seconds of the oldest batch that some connected reader should get and has not got yet."""

    @property
    def streams(self) -> list[int]:
        """Slots (numbers) of the streams that the driver serves now."""

    @property
    def busy(self) -> int:
        """Number of answers to readers that are not completely sent yet."""

    def end_answers(self) -> int:
        """End all unfinished answers with the marker END, and count them in ``stats``.

        Returns:
            The number of these answers.
        """

    def retire(self, stream: int) -> None:
        """Stop serving one stream for good, because its source no longer exists.

        Before that, the driver has to make sure that each connected reader drops the stream's blocks, even a reader
        that has not got all batches yet.
        """

    def close(self, stream: int, linger: float = 0.0) -> None:
        """Stop serving one stream. Before that, send its queued messages for up to ``linger`` seconds."""


OutputFactory = Callable[[int, OutputConfig, Services], OutputDriver]
"""A function that constructs the driver of one output. An entry point of ``kvbus.outputs`` names such a function.

Its arguments are the output's index in the configuration, the output's configuration, and the daemon's services. It
opens no connection and no file.
"""


@runtime_checkable
class ViewDriver(OutputDriver, Protocol):
    """A driver whose readers may have limited rights.

    A view is a separate version of the output's streams, with only the blocks that readers with certain rights may see.
    Commands and events name a view by its number. The policy that :meth:`allow` receives assigns a view to each CURVE
    key.
    """

    def open_view(self, number: int, stream: int, topic: bytes) -> None:
        """Start serving one stream of a view, which has only the blocks that readers with certain rights may see.

        The output's own stream in the same slot is already open.

        Args:
            number: the number of the view.
            stream: the slot of the stream.
            topic: the topic of the stream when it is opened.
        """

    def close_view(self, number: int, stream: int) -> None:
        """Stop serving one stream of a view, and disconnect its readers."""

    @property
    def views(self) -> list[tuple[int, int]]:
        """The open streams of all views, each as a tuple of the view's number and the stream's slot."""
