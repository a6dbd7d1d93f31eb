"""An example of an output type in a separate distribution: it appends each batch to a file, as a line of JSON.

``endpoint: ipc:///var/lib/blocks.jsonl`` names the file. No router connects to a file, so there are no requests to
answer and no connections to close.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from io import FileIO

from kvbus.common.errors import BindError
from kvbus.config import OutputConfig
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Publish, SendState
from kvbus.core.stats import RouterView
from kvbus.parts.outputs.contract import Services
from kvbus.transport.sockets import PeerPolicy


class LinesOutput:
    """The files of one output, one for each stream.

    It implements :class:`~kvbus.parts.outputs.contract.OutputDriver`.
    """

    busy = 0
    queue_max = 0
    behind_seconds = 0.0

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        self._config = config
        self._stats = services.stats
        self._files: dict[int, FileIO] = {}
        self._queues: dict[int, deque[Publish]] = {}

    def open(self, stream: int, topic: bytes, policy: PeerPolicy) -> None:
        path = self._config.stream_endpoints(stream).endpoint.removeprefix("ipc://")
        try:
            self._files[stream] = FileIO(path, "ab")
        except OSError as error:
            raise BindError(path, str(error.strerror), verb="append to") from error
        self._queues[stream] = deque()
        self._stats.queue_limit += self._config.queue_batches

    def publish(self, command: Publish) -> None:
        queue = self._queues[command.stream]
        if len(queue) >= self._config.queue_batches:
            self._drop("queue_full", command)
            return
        queue.append(command)
        self._stats.queue_depth += 1

    def flush(self) -> None:
        for stream, queue in self._queues.items():
            while queue:
                self._append(self._files[stream], queue.popleft())

    def _append(self, file: FileIO, command: Publish) -> None:
        stats, begin = self._stats, file.tell()
        stats.queue_depth -= 1
        batch = {"topic": command.topic.decode(), "seq": command.seq, "payload": command.payload.hex()}
        line = f"{json.dumps(batch)}\n".encode()
        try:
            whole = file.write(line) == len(line)
        except OSError:
            whole = False
        if not whole:
            with contextlib.suppress(OSError):  # a partial line would make the next line invalid
                file.truncate(begin)
            self._drop("write_failed", command)
            return
        stats.batches += 1
        stats.events += command.events
        stats.bytes += len(command.payload)

    def _drop(self, reason: str, command: Publish) -> None:
        self._stats.dropped_batches[reason] += 1
        self._stats.dropped_events[reason] += command.events

    def answer(self, command: AnswerReplay | AnswerSnapshot, messages: Iterator[list[bytes]]) -> None:
        """Do nothing, because no reader of a file can send a request."""

    def allow(self, policy: PeerPolicy) -> bool:
        """Return False (nothing was changed): readers of the file have no connection that kvbus could close."""
        return False

    def send_state(self, command: SendState) -> None:
        """Do nothing, because no reader of a file can subscribe."""

    def reopen(self, policy: PeerPolicy) -> None:
        """Do nothing. The readers of a file have no connection to kvbus that could be closed and opened again."""

    @property
    def routers(self) -> list[RouterView]:
        return []  # the driver cannot know which programs read a file

    @property
    def streams(self) -> list[int]:
        return list(self._files)

    def end_answers(self) -> int:
        return 0

    def retire(self, stream: int) -> None:
        self.close(stream)

    def close(self, stream: int, linger: float = 0.0) -> None:
        self.flush()
        self._files.pop(stream).close()
        del self._queues[stream]
        self._stats.queue_limit -= self._config.queue_batches
