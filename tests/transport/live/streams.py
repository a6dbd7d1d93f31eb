"""The live side of an output stream for tests, without a relay.

SUB sockets of the test read it, stall, or disconnect.
"""

import asyncio
import contextlib
from typing import Any

import zmq

from kvbus.core.blocks.compaction import SnapshotChunks
from kvbus.core.commands import SendState
from kvbus.core.outputs.stream import StateTransfer
from kvbus.core.stats import OutputStats
from kvbus.transport.live.stream import LivePublisher
from kvbus.transport.sender import Sender
from kvbus.transport.zmtp.endpoint import Listener
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.settings import DEFAULT_SETTINGS
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.loops import read_all, turns, u64

TOPIC = b"kv@pod"
BIG = 20_000


class Slices:
    """A substitute for a state snapshot. It has ``count`` batches of about ``size`` bytes each."""

    def __init__(self, count, size):
        self.fewest = count
        self._size = size

    def chunks(self, _room):
        plans = ((at, False, ()) for at in range(self.fewest))
        return SnapshotChunks(plans, lambda plan: iter([b"state %d" % plan[0] + bytes(self._size)]), self.fewest)


class Sub:
    """A SUB socket and the messages that it has read, each as its kind (the first word of the payload) and its seq."""

    def __init__(self, context, endpoint, topics, *, slow):
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 1 if slow else 0)
        if slow:
            self.socket.setsockopt(zmq.RCVBUF, 4096)
        for topic in topics:
            self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.socket.connect(endpoint)
        self.got = []

    def read(self):
        """Read the messages that have arrived. Return all messages so far, each as its kind and its seq.

        The kind is the first word of the payload, such as ``state``.
        """
        for _topic, seq, payload in read_all(self.socket):
            self.got.append((payload.split(b" ")[0].rstrip(b"\0").decode(), int.from_bytes(seq[:8], "big")))
        return self.got

    def seqs(self, kind=None):
        return [seq for name, seq in self.read() if kind in {None, name}]

    @property
    def holes(self):
        seqs = self.seqs()
        return sorted({*range(seqs[0], seqs[-1])} - {*seqs})


class Stream:
    """A stream's `LivePublisher`, a substitute for the relay that feeds it, and the stream's routers."""

    def __init__(self, context, *, state, **settings):
        self.stats = OutputStats()
        self.port = free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.next_seq = 0
        self.topic = TOPIC
        self.slices: Any = Slices(2, 100)
        self.answers = True
        """Whether this substitute for the relay sends the state when the publisher requests it."""
        self.asked = []
        self._context = context
        self._open = []
        settings = {"queue_batches": 1000, "send_hwm": 1000, "send_bytes": 2**30, **settings}
        waiting = settings.pop("waiting", None)
        self.waiting: list[Any] = [] if waiting is None else waiting
        self._flushed_soon = waiting is None
        self.sender = Sender()
        self.live = LivePublisher(
            3,
            TOPIC,
            "routers",
            lambda handler: Listener(self.endpoint, Role.PUB, handler),
            sender=self.sender,
            stats=self.stats,
            waiting=self.waiting,
            request_state=self._request if state else None,
            **settings,
        )

    def _request(self, routers):
        self.asked.append(routers)
        if self.answers:
            self.send_state(routers)

    def send_state(self, routers):
        transfer = StateTransfer(self.slices, self.next_seq, self.topic, b"")
        for _ in range(transfer.first_seq, transfer.end_seq):
            self.publish(1, "empty", events=0)
        self.live.send_state(SendState(0, 3, routers, transfer))

    def publish(self, count, name="live", *, size=0, events=2):
        for _ in range(count):
            self.live.publish(self.topic, u64(self.next_seq), name.encode() + b" " * bool(size) + bytes(size), events)
            self.next_seq += 1
        if self._flushed_soon:
            asyncio.get_running_loop().call_soon(self.live.flush)

    def send(self, count, **how):
        self.publish(count, **how)
        self.live.flush()

    def sub(self, *topics, slow=False):
        self._open.append(Sub(self._context, self.endpoint, topics or [b""], slow=slow))
        return self._open[-1]

    @property
    def states(self):
        return [view.state for view in self.live.connected]

    @property
    def slow_drops(self):
        return self.stats.dropped_batches["slow_router"]

    async def are(self, *states):
        await eventually(lambda: sorted(self.states) == sorted(states), f"{states}, not {self.states}")

    async def level(self, *subs):
        """Wait until the given SUB sockets have read the stream's newest batch."""
        for sub in subs:
            await eventually(lambda sub=sub: (sub.seqs() or [-1])[-1] == self.next_seq - 1, "the newest batch")

    async def stalled(self, reads, drops=30):
        """Publish until kvbus has dropped ``drops`` batches for slow routers.

        The routers in ``reads`` read everything.
        """
        while self.slow_drops < drops:
            self.send(10, size=BIG)
            await self.level(*reads)

    async def fills(self):
        """Wait until the connection of the stream's second router accepts no more data.

        It is full if kvbus's queue for it has the same size in a hundred checks. To wait for a fixed time would prove
        nothing, because the process may get no CPU time.
        """
        queued = looks = 0

        def full():
            nonlocal queued, looks
            now = self.live.connected[1].queued_bytes
            queued, looks = now, looks + 1 if now == queued else 0
            return queued > DEFAULT_SETTINGS.high_water and looks > 100

        await eventually(full, "a peer that is full")

    def close(self):
        self.live.close()
        for sub in self._open:
            sub.socket.close(0)


@contextlib.asynccontextmanager
async def stream_of(context, *, state=True, **settings):
    made = Stream(context, state=state, **settings)
    try:
        yield made
    finally:
        made.close()
        await turns()
