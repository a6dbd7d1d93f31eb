"""An output stream with a replay server for tests, and libzmq clients that read only when the test calls them."""

import asyncio
import contextlib

import zmq

from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.stats import OutputStats
from kvbus.core.wire.frames import parse_replay_request
from kvbus.core.wire.profiles import PROFILES
from kvbus.transport.replay import ReplayServer, sender_of_output
from tests.doubles.answers import answer_of
from tests.doubles.bus import PATIENCE
from tests.ports import free_port
from tests.transport.loops import END, read_all, turns, u64


def no_cut(_):
    raise AssertionError("the journal holds everything")


class Served:
    """A stream with `count` batches, and the replay server that answers requests for them."""

    def __init__(
        self, count, *, profile="vllm", payload=b"payload", sessions=64, beside=None, stall_timeout=30.0, **options
    ):
        self.stream = OutputStream(b"kv@a@m", PROFILES[profile], Journal(10**6, 2**40), heartbeat=0, rank=0)
        for _ in range(count):
            self.stream.append(payload, 0.0)
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.stats = OutputStats() if beside is None else beside.stats
        self.asked = 0
        if beside is None:
            self.sender = sender_of_output(self.stats, sessions, stall_timeout=stall_timeout)
        else:
            self.sender = beside.sender
        options |= {"on_request": self.on_request, "stats": self.stats, "sender": self.sender}
        self.server = ReplayServer(self.endpoint, **options)

    def on_request(self, frames):
        self.asked += 1
        answer = self.answer(parse_replay_request(frames))
        self.server.send(answer, answer.messages())

    def answer(self, request):
        return answer_of(self.stream, request, no_cut)

    @property
    def outcomes(self):
        return {outcome: n for outcome, n in self.stats.replay_requests.items() if n}


@contextlib.asynccontextmanager
async def served(count, *, kind=Served, **options):
    one = kind(count, **options)
    try:
        yield one
    finally:
        one.server.close()
        await turns()


class Requester:
    """A replay client that reads only when the test calls it."""

    def __init__(self, context, endpoint, *, kind=zmq.DEALER, hwm=1000, small=False):
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, hwm)
        if small:
            self.socket.setsockopt(zmq.RCVBUF, 65_536)
        self.socket.connect(endpoint)
        self.got = []

    def ask(self, start=0):
        self.socket.send_multipart([b"", u64(start)])

    def read(self):
        self.got.extend(read_all(self.socket))
        return self.ended

    async def drain(self):
        """Read the answer until END as fast as the server sends.

        With a low high-water mark, few messages arrive at a time.
        """
        async with asyncio.timeout(PATIENCE):
            while not self.read():  # noqa: ASYNC110 - a socket sets no asyncio.Event
                await asyncio.sleep(0)

    @property
    def ended(self):
        return bool(self.got) and self.got[-1][-2] == END

    def seqs(self):
        return [int.from_bytes(frames[-2], "big") for frames in self.got[:-1]]

    def close(self):
        self.socket.close()


def requester(context, one, **options):
    made = Requester(context, one.endpoint, **options)
    made.ask()
    return made
