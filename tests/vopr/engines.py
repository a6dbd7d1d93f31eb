"""Simulated engines, and a simulation of the connections between them and kvbus.

Like vLLM and SGLang, an engine publishes on a PUB and answers replay requests on a ROUTER in one thread. Therefore an
answer is the content of the replay buffer at one moment. :class:`SimLive` and :class:`SimRequest` stand for the sockets
of a source, :class:`~kvbus.transport.subscription.DialledStream` and
:class:`~kvbus.transport.request.RequestConnection`. Queues drop messages at the engine's high-water mark, and a broken
connection loses messages. The simulation is harsher than the real sockets: the begin and the end of a connection may be
reported before or after nearby messages. A subscription takes effect some time after the connection, and an answer may
arrive in parts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from kvbus.core.wire.frames import END_SEQ
from kvbus.transport.pump import CAP
from kvbus.transport.subscription import Events
from tests.properties.world import Change, Engine, seq_frame
from tests.vopr.process import SimLoop
from tests.vopr.schedule import Schedule

RECONNECT = 0.1
"""Seconds after which a broken connection is first tried again."""


class EngineNode:
    """The process of an engine at one address, with its cache, its sockets and its network link."""

    def __init__(self, schedule: Schedule, name: str, engine: Engine, hwm: int) -> None:
        self.schedule, self.name = schedule, name
        self.chance = schedule.chance(f"engine {name}")
        self.engine = engine
        self.hwm = hwm
        self.running = True
        self.reachable = True
        self.stalled = False
        """Whether the network link delivers nothing, although its connections stay open."""
        self.rate = 10.0
        self.live: list[SimLive] = []
        self.requests: list[SimRequest] = []
        self.sent = 0
        """Number of payload bytes that the engine has published."""
        self.break_answer: int | None = None
        """Number of messages after which the engine's next replay answer breaks off, or None."""
        self.drop_of_answer: int | None = None
        """Index of the message that is lost from the engine's next replay answer, or None."""
        self.answer_pace = 0.0005
        self.first = True
        schedule.after(self.chance.random(), self._step)

    @property
    def up(self) -> bool:
        """Whether connections to the engine succeed: it runs, and its network link is up."""
        return self.running and self.reachable

    # -- publishing --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self.running and self.rate:
            self.publish(self.changes())
        self.schedule.after(self.chance.uniform(0.5, 1.5) / (self.rate or 1.0), self._step)

    def changes(self) -> list[Change]:
        chance = self.chance
        if self.first:  # an event with two blocks proves the engine's block size
            self.first = False
            return [("chain", 2, "GPU"), ("remove", 1, "GPU"), ("remove", 2, "GPU")]
        changes: list[Change] = []
        for _ in range(chance.choice([1, 1, 2, 4])):
            medium = chance.choice(["GPU", "GPU", "GPU", "CPU"])
            what = chance.choice(["store", "store", "chain", "chain", "remove", "remove", "remove"])
            changes.append((what, chance.randint(2 if what == "chain" else 1, 40), medium))
        if chance.random() < 0.01:
            changes.append(("clear",))
        return changes

    def publish(self, changes: list[Change]) -> None:
        """Publish a batch with these changes of the cache to all subscribers."""
        seq, payload = self.engine.publish(changes)
        self.sent += len(payload)
        message = [b"", seq_frame(seq, self.engine.publisher), payload]
        for live in self.live:
            live.send(message)

    def publish_again(self) -> None:
        """Publish the engine's newest batch a second time, as a faulty network may do."""
        if self.running and self.engine.buffer:
            seq, payload = self.engine.buffer[-1]
            for live in self.live:
                live.send([b"", seq_frame(seq, self.engine.publisher), payload])

    # -- faults ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Kill the engine's process."""
        self.running = False
        self.disconnect()

    def start(self) -> None:
        """Start a new engine process with an empty cache. Its first batch has seq 0."""
        if not self.running:
            self.engine.restart()
            self.first = True
            self.running = True

    def disconnect(self) -> None:
        """Break every connection of the engine."""
        for live in list(self.live):
            live.broken()
        for request in list(self.requests):
            request.broken()

    def stall(self, *, stalled: bool) -> None:
        """Stop delivering the engine's messages, or, if ``stalled`` is False, deliver the waiting messages and
        continue.
        """
        self.stalled = stalled
        if not stalled:
            for live in self.live:
                live.move()
            for request in self.requests:
                request.move()

    # -- answers -----------------------------------------------------------------------------------------------------

    def answer(self, frames: list[bytes]) -> list[list[bytes]]:
        """Return the messages that the engine's ROUTER sends for a request."""
        publisher = self.engine.publisher
        if len(frames) < 2:
            return [self.engine.snapshot()]
        start = int.from_bytes(frames[-1], "big")
        answer = [[b"", b"", seq_frame(seq, publisher), payload] for seq, payload in self.engine.buffer if seq >= start]
        answer.append([b"", b"", END_SEQ, b""])
        if self.break_answer is not None:
            answer, self.break_answer = answer[: self.break_answer], None
        if self.drop_of_answer is not None and len(answer) > 1:  # the queue has room for the first message
            del answer[1 + self.drop_of_answer % (len(answer) - 1)]
            self.drop_of_answer = None
        return answer


class Directory:
    """The simulated engines by address. A test may move an address to another engine."""

    def __init__(self) -> None:
        self.nodes: dict[str, EngineNode] = {}
        self.others: dict[EngineNode, EngineNode] = {}
        """For an engine whose replay address leads to another engine: that engine."""

    def answering(self, endpoint: str) -> EngineNode | None:
        """Return the engine that answers requests at an address; None if no engine is there."""
        node = self.find(endpoint)
        return node if node is None else self.others.get(node, node)

    def find(self, endpoint: str) -> EngineNode | None:
        """Return the engine at an address; None if no engine is there.

        A test may move ``tcp://name:port`` to another engine. ``tcp://@name:port`` always leads to the same engine.
        """
        return self.nodes.get(endpoint.removeprefix("tcp://").rpartition(":")[0])


class _Socket:
    """A simulated libzmq socket, which passes arriving messages to the event loop of its process."""

    def __init__(self, directory: Directory, endpoint: str, handler: Callable[[list[bytes]], None]) -> None:
        loop: Any = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop, self.schedule = loop, loop.schedule
        self.directory, self.endpoint = directory, endpoint
        self.node: EngineNode | None = None
        self.wire: deque[list[bytes]] = deque()
        self.queue: deque[list[bytes]] = deque()
        self.closed = False
        self._moving = False
        self._handler = handler
        self._after: Callable[[], None] = lambda: None
        loop.sockets[id(self)] = self

    @property
    def unread(self) -> bool:
        return bool(self.queue)

    def _paused(self, again: Callable[[], None], late: float = 0.003) -> bool:
        """Return whether the process is paused. If it is, call ``again`` shortly after the end of the pause.

        libzmq's own threads pause with the process, and resume a little later. So timers that are due run before the
        process sees the messages that arrived during the pause.
        """
        until = self.loop.paused_until
        if until <= self.schedule.now:
            return False
        self.schedule.at(until + late, again)
        return True

    def _arrive(self, most: int) -> None:
        """Move up to ``most`` messages that are in transit to the queue from which the process reads."""
        for _ in range(min(most, len(self.wire))):
            self.queue.append(self.wire.popleft())
        if self.queue:
            self.loop.mark(self, self._readable)

    def _readable(self) -> None:
        if self.closed:
            return
        try:
            for _ in range(min(CAP, len(self.queue))):
                self._handler(self.queue.popleft())
                if self.closed:
                    return
        finally:
            self._after()
        if self.queue:
            self.loop.mark(self, self._readable)

    def close(self) -> None:
        """Close the socket. Messages that the process has not read are lost."""
        self.closed = True
        self.loop.sockets.pop(id(self), None)
        self.loop.unmark(self)
        self._leave()
        self.wire.clear()
        self.queue.clear()

    def _leave(self) -> None:
        raise NotImplementedError


class SimLive(_Socket):
    """A simulated subscription to an engine's live stream, in place of
    :class:`kvbus.transport.subscription.DialledStream`.
    """

    reached = None
    """Address that the host name led to. It is always None, because the simulated network has no host names."""

    def __init__(self, directory: Directory, endpoint: str, events: Events) -> None:
        super().__init__(directory, endpoint, events.message)
        self._events = events
        self._after = events.drained or self._after
        self._wait = RECONNECT
        self._told: deque[bool] = deque()
        self.chance = self.schedule.chance(f"live {endpoint} {self.schedule.now}")
        self.schedule.after(0.001, self._dial)

    def _dial(self) -> None:
        if self.closed or self.node is not None:
            return
        node = self.directory.find(self.endpoint)
        if node is None or not node.up or node.stalled:
            self.schedule.after(self._wait, self._dial)
            self._wait = min(2.0, 2 * self._wait)
            return
        self._wait = RECONNECT
        self.node = node
        self._monitor(True)
        # kvbus reports the connection before the publisher has processed the subscription
        self.schedule.after(self.chance.choice([0.0005, 0.0005, 0.05]), self._joined, node)

    def beside(self, endpoint: str) -> str:
        """Return an endpoint that leads to the engine to which this subscription is connected."""
        return endpoint if self.node is None else f"tcp://@{self.node.name}:{endpoint.rpartition(':')[2]}"

    def _joined(self, node: EngineNode) -> None:
        if self.node is node and not self.closed and self not in node.live:
            node.live.append(self)

    def _monitor(self, up: bool) -> None:
        self._told.append(up)
        self.schedule.after(self.chance.choice([0.0, 0.0, 0.01]), self._say)

    def _say(self) -> None:
        if not self.closed and not self._paused(self._say):
            self.loop.mark((self, "monitor"), self._monitored)

    def _monitored(self) -> None:
        while self._told and not self.closed:
            self._events.connection(self._told.popleft())

    def send(self, message: list[bytes]) -> None:
        """Queue a message of the engine for this subscriber, or drop it if the queue is full."""
        node = self.node
        if node is None or len(self.wire) + len(self.queue) >= node.hwm:
            return
        self.wire.append(message)
        self.move()

    def move(self) -> None:
        """Deliver the waiting messages after a random delay, unless the engine's link is stalled."""
        if not self._moving and self.wire and self.node is not None and not self.node.stalled:
            self._moving = True
            self.schedule.after(self.chance.choice([0.0002, 0.0002, 0.005]), self._come)

    def _come(self) -> None:
        if self.loop.paused_until > self.schedule.now:
            # TCP doubles its retry interval each time, so after a pause the next retry may take as long again as the
            # pause took
            self._paused(self._come, self.chance.choice([0.003, 0.003, self.loop.paused_for]))
            return
        self._moving = False
        if not self.closed and self.node is not None and not self.node.stalled:
            self._arrive(len(self.wire))
            self.move()

    def broken(self) -> None:
        """Break the connection.

        Messages that have not arrived are lost; messages that have arrived stay in the queue.
        """
        self._leave()
        self.wire.clear()
        if not self.closed:
            self._monitor(False)
            self.schedule.after(RECONNECT, self._dial)

    def _leave(self) -> None:
        if self.node is not None and self in self.node.live:
            self.node.live.remove(self)
        self.node = None


class SimRequest(_Socket):
    """A simulated replay request on its own connection, in place of
    :class:`kvbus.transport.request.RequestConnection`.
    """

    def __init__(self, directory: Directory, endpoint: str, request: list[bytes], handler: Any) -> None:
        super().__init__(directory, endpoint, handler)
        self._request: list[bytes] | None = request
        self.chance = self.schedule.chance(f"request {endpoint} {self.schedule.now}")
        self.schedule.after(0.001, self._dial)

    def _dial(self) -> None:
        if self.closed or self._request is None:
            return
        node = self.directory.answering(self.endpoint)
        if node is None or not node.up or node.stalled:
            self.schedule.after(RECONNECT, self._dial)  # the request waits in its socket for the connection
            return
        self.node = node
        node.requests.append(self)
        self.schedule.after(self.chance.choice([0.001, 0.001, 0.1]), self._asked, node)

    def _asked(self, node: EngineNode) -> None:
        if self.closed or self.node is not node or self._request is None:
            return
        self.wire.extend(node.answer(self._request))
        self._request = None
        self.move()

    def move(self) -> None:
        """Deliver the waiting messages of the answer after a delay, unless the engine's link is stalled."""
        if not self._moving and self.wire and self.node is not None and not self.node.stalled:
            self._moving = True
            self.schedule.after(self.node.answer_pace, self._come)

    def _come(self) -> None:
        if self._paused(self._come):
            return
        self._moving = False
        if not self.closed and self.node is not None and not self.node.stalled:
            self._arrive(self.chance.choice([1, 3, 20, 1000]))
            self.move()

    def broken(self) -> None:
        """Break the connection of the request. libzmq connects again, but the engine has forgotten the request."""
        self._leave()
        self.wire.clear()

    def _leave(self) -> None:
        if self.node is not None and self in self.node.requests:
            self.node.requests.remove(self)
        self.node = None
