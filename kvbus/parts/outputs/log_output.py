"""The common driver of outputs that write to a log: Kafka, NATS or Redis.

An :class:`~kvbus.parts.outputs.appending.Appender` writes each stream.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbus.config import LogKeys, OutputConfig
from kvbus.config.logs import SEPARATOR
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Publish, SendState
from kvbus.core.events import Subscribed
from kvbus.core.stats import RouterView
from kvbus.parts.log.contract import Log
from kvbus.parts.log.record import Stream
from kvbus.parts.outputs.appending import READER, Appender
from kvbus.parts.outputs.contract import Services
from kvbus.transport.sockets import PeerPolicy


class LogOutput:
    """The driver of one output that writes to a log; see :class:`~kvbus.parts.outputs.contract.OutputDriver`.

    Args:
        output: the output's index in the configuration.
        config: the output's configuration.
        services: the daemon's counters, functions and limits for this driver.
        target: the log.
    """

    queue_max = 0
    behind_seconds = 0.0

    def __init__(self, output: int, config: OutputConfig, services: Services, target: Log) -> None:
        keys = config.log or LogKeys()
        self._output = output
        self._config = config
        self._services = services
        self._log = target
        self._cluster = keys.cluster
        self._state_every = keys.state_every
        self._open: dict[int, Appender] = {}
        self._closing: list[Appender] = []

    def open(self, stream: int, topic: bytes, policy: PeerPolicy) -> None:
        """Start writing one stream to the log.

        As soon as the log can be reached, kvbus becomes the stream's writer there.
        """
        del policy  # not needed, because the broker decides which clients may read
        named = stream_of(self._cluster, topic, stream)
        subscription = Subscribed(self._output, stream, (READER,))
        self._open[stream] = Appender(self._log, named, self._config, self._services, subscription, self._state_every)

    def publish(self, command: Publish) -> None:
        """Queue one batch for the log."""
        self._open[command.stream].publish(command)

    def flush(self) -> None:
        """Pass the batches that were queued since the last flush to the tasks that write the log."""
        for each in self._open.values():
            if each.fresh:
                each.flush()

    def answer(self, command: AnswerReplay | AnswerSnapshot, messages: Iterator[list[bytes]]) -> None:
        """Do nothing, because the readers of a log cannot send requests to kvbus."""

    def send_state(self, command: SendState) -> None:
        """Queue the state that the stream's appender has requested from the relay."""
        appender = self._open.get(command.stream)
        if appender is not None:
            appender.state(command.transfer)

    def allow(self, policy: PeerPolicy) -> bool:
        """Ignore the policy and return True, because the broker decides which clients may read."""
        del policy
        return True

    def reopen(self, policy: PeerPolicy) -> None:
        """Do nothing, because no reader of a log is connected to kvbus."""

    @property
    def routers(self) -> list[RouterView]:
        """An empty list, because kvbus does not know which programs read the log."""
        return []

    @property
    def streams(self) -> list[int]:
        """Slots (numbers) of the streams that this output writes to its log now."""
        return list(self._open)

    @property
    def busy(self) -> int:
        """Number of batches, states and other items that are not in the log yet, including those of closed streams."""
        self._closing = [each for each in self._closing if each.busy]
        return sum(each.busy for each in (*self._open.values(), *self._closing))

    def end_answers(self) -> int:
        """Return 0, because this output sends no answers."""
        return 0

    def retire(self, stream: int) -> None:
        """Stop writing one stream for good.

        Before that, append the queued batches and the end of the stream to the log.
        """
        appender = self._open.pop(stream)
        self._closing.append(appender)
        appender.retire()

    def close(self, stream: int, linger: float = 0.0) -> None:
        """Stop writing one stream. Before that, append its queued batches for up to ``linger`` seconds."""
        appender = self._open.pop(stream, None)
        if appender is not None:
            self._closing.append(appender)
            appender.close(linger)


def stream_of(cluster: str, topic: bytes, slot: int) -> Stream:
    """Return the names under which a stream is written to the log: cluster, model, worker and rank.

    They come from the stream's topic. The default topic of a log output has the model, the worker and the rank,
    separated by :data:`SEPARATOR`. Any other topic is used as the worker's name, and the slot as the rank.
    """
    parts = topic.decode().split(SEPARATOR)
    if len(parts) == 3 and parts[2].isdigit():
        return Stream(cluster, parts[0], parts[1], int(parts[2]))
    return Stream(cluster, "", topic.decode(), slot)
