"""Tests for the replay server on kvbus's own ZMTP, with clients that never read.

They delay no other client, and all clients get equal shares.
"""

import asyncio
import contextlib
import resource
import socket
import threading
import time
import tracemalloc

import pytest

from kvbus.transport import replay as replay_module
from kvbus.transport.replay import MAX_WAITING
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.wire import encode_message
from tests.doubles.bus import eventually
from tests.transport.loops import END, both_loops, u64
from tests.transport.replaying import Served, requester, served
from tests.transport.zmtp.peers import hello
from tests.transport.zmtp.test_listener import bare

DEALER = hello(b"DEALER")
SMALL = 4_096
MEGABYTE = 2**20


def request(start=0):
    return encode_message([b"", u64(start)])


@pytest.fixture
def descriptors():
    """Raise the limit of file descriptors, so that the process can open thousands of sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8_192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def never_reading(one, count, asked=1):
    """Open ``count`` connections that send ``asked`` requests each and never read a byte of the answers."""
    made = []
    try:
        for _ in range(count):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
            raw.connect(("127.0.0.1", int(one.endpoint.rpartition(":")[2])))
            raw.sendall(DEALER + request() * asked)
            made.append(raw)
        yield made
    finally:
        for raw in made:
            raw.close()


class Reader(threading.Thread):
    """A healthy router in a separate thread. It sends one request and reads the answer as fast as it can."""

    def __init__(self, one):
        super().__init__()
        self.port = int(one.endpoint.rpartition(":")[2])
        self.size = 0

    def run(self):
        with socket.create_connection(("127.0.0.1", self.port)) as raw:
            raw.sendall(DEALER + request())
            tail = b""
            while not tail.endswith(END + b"\0\0"):
                data = raw.recv(MEGABYTE)
                if not data:
                    return
                self.size += len(data)
                tail = (tail + data)[-10:]


async def timed(one):
    """Return the seconds in which a healthy router got its complete answer, and the CPU seconds that this process
    used.
    """
    loop = asyncio.get_running_loop()
    reader, begin, busy = Reader(one), loop.time(), time.process_time()
    reader.start()
    await eventually(lambda: not reader.is_alive(), "the whole answer")
    assert reader.size > 5_000 * 4_000
    return loop.time() - begin, time.process_time() - busy


@both_loops
@pytest.mark.slow
async def test_a_thousand_clients_that_never_read_delay_no_other_client(context, descriptors):
    async with served(5_000, payload=b"p" * 4_000) as one:
        alone = [await timed(one) for _ in range(5)]
        with never_reading(one, 1_000):
            await eventually(lambda: one.asked == 1_005, "their requests")
            _, first = await timed(one)
            beside = [await timed(one) for _ in range(5)]
            await eventually(lambda: one.server.busy == 1_000 and not one.stats.replay_sessions, "all but these parked")
            # On a busy machine, elapsed times vary much, but CPU times do not.
            assert min(busy for _, busy in beside) <= 2 * min(busy for _, busy in alone)
            assert min(waited for waited, _ in beside) <= 2 * min(waited for waited, _ in alone) + 10  # no time-out
            assert first < 20  # while the other requesters are served too
        assert one.outcomes["complete"] == 11
        await eventually(lambda: one.server.busy == 0, "the others' end")
        assert one.outcomes == {"complete": 11, "gone": 1_000}


async def read_complete_answer(reader):
    """Read a replay answer from a connection, up to and including END."""
    tail = b""
    while not tail.endswith(END + b"\0\0"):
        data = await reader.read(MEGABYTE)
        assert data
        tail = (tail + data)[-10:]


@both_loops
async def test_a_client_that_stops_reading_does_not_delay_a_new_client(context):
    async with (
        served(5_000, payload=b"p" * 4_000) as one,
        bare(one.endpoint, DEALER + request()) as (reader, _),
        bare(one.endpoint, DEALER) as (other, writer),
    ):
        await reader.readexactly(2 * MEGABYTE)
        writer.write(request())
        await read_complete_answer(other)
        await read_complete_answer(reader)


@both_loops
async def test_200_clients_that_never_read_cost_little_memory(context, descriptors):
    async with served(5_000, payload=b"p" * 4_000) as one:
        tracemalloc.start()
        try:
            with never_reading(one, 200):
                await eventually(lambda: one.server.busy == 200 and not one.stats.replay_sessions, "all of them parked")
                # kvbus may hold at most one share and one message for each of the 200 clients.
                assert tracemalloc.get_traced_memory()[1] < 200 * 200_000
        finally:
            tracemalloc.stop()


@both_loops
async def test_kvbus_stops_reading_a_connection_with_too_many_open_requests(context):
    """kvbus stops reading a connection that sends request after request.

    Without this limit, 400 requests of a few bytes each took 1.3 GB of memory.
    """
    async with served(5_000, payload=b"p" * 4_000) as one:
        tracemalloc.start()
        try:
            async with bare(one.endpoint, DEALER, buffer=SMALL) as (_, writer):
                writer.write(request() * 50_000)
                await eventually(lambda: one.asked == 17, "one answer under way, and those behind it")
                assert one.server.busy == 17
                assert tracemalloc.get_traced_memory()[1] < 4 * MEGABYTE
                client = requester(context, one)
                await client.drain()
                assert one.asked == 18
                client.close()
        finally:
            tracemalloc.stop()
        await eventually(lambda: one.outcomes == {"complete": 1, "gone": 17}, "its end")


@both_loops
async def test_a_client_that_acknowledges_no_data_is_disconnected_and_counted(context):
    async with served(4_000, payload=b"p" * 4_000, stall_timeout=0.3) as one:
        with never_reading(one, 3, asked=2) as stalled:
            await eventually(lambda: one.outcomes == {"stalled": 6}, "their end")
            assert one.server.busy == 0
            for raw in stalled:
                raw.settimeout(10)
                with contextlib.suppress(ConnectionError):
                    while raw.recv(MEGABYTE):
                        pass


@both_loops
async def test_a_client_that_does_not_read_a_short_answer_is_disconnected(context):
    """kvbus ends a connection whose client does not read its answer, even if the answer is short.

    kvbus has then already passed the complete answer to the connection.
    """
    async with served(10, payload=b"p" * 40_000, stall_timeout=0.3) as one:
        with never_reading(one, 1):
            await eventually(lambda: one.outcomes, "its end")
            # The answer counts as complete if the client's kernel has received all of it, even if the client has not read it.
            assert one.outcomes in ({"stalled": 1}, {"complete": 1})


@both_loops
async def test_a_client_that_reads_slowly_is_never_given_up(context):
    """kvbus does not give up a client that reads slowly: 3 MB at 300 kB/s, with a stall_timeout of a third of this
    time.
    """
    async with served(750, payload=b"p" * 4_000, stall_timeout=3.0) as one:
        async with bare(one.endpoint, DEALER + request(), buffer=SMALL) as (reader, _):
            loop, got = asyncio.get_running_loop(), 0
            begin = loop.time()
            while got < 3_000_000:
                data = await reader.read(15_000)
                assert data
                got += len(data)
                ahead = got / 300_000 - (loop.time() - begin)
                if ahead > 0:
                    await asyncio.sleep(ahead)
            assert loop.time() - begin > 9
        await eventually(lambda: one.outcomes == {"complete": 1}, "its outcome")


@both_loops
async def test_clients_of_large_and_of_small_batches_get_equally_many_bytes(context):
    """A client with large batches and a client with small batches get equally many bytes, so they finish at about the
    same time.
    """

    class Mixed(Served):
        def answer(self, request):
            made = super().answer(request)
            return made if request.start else Large(made)

    class Large:
        def __init__(self, inner):
            self.envelope, self.outcome, self.finished = inner.envelope, "complete", False

        def messages(self):
            for left in range(99, -1, -1):
                self.finished = not left
                yield [*self.envelope, b"x" * (100_000 if left else 1)]

    async with served(100_001, payload=b"p" * 70, kind=Mixed) as one:
        ends, sizes = [], {}
        loop = asyncio.get_running_loop()

        async def read(start, size):
            async with bare(one.endpoint, DEALER + request(start)) as (reader, _):
                sizes[start] = 0
                while sizes[start] < size:
                    sizes[start] += len(await reader.read(MEGABYTE))
                ends.append((loop.time(), dict(sizes)))

        await asyncio.gather(read(0, 9_000_000), read(1, 9_000_000))
        assert all(size > 6_000_000 for size in ends[0][1].values())


@both_loops
async def test_a_client_that_does_not_read_holds_no_session(context):
    async with served(4_000, payload=b"p" * 4_000, sessions=1) as one:
        with never_reading(one, 5):
            await eventually(lambda: one.asked == 5, "their requests")
            client = requester(context, one)
            await client.drain()
            assert client.seqs() == list(range(4_000))
            stats = one.stats  # as long as their kernels accept data, kvbus serves them
            await eventually(lambda: (stats.replay_sessions, stats.replay_waiting) == (0, 5), "nobody with a place")
            assert one.server.busy == 5
            client.close()
        await eventually(lambda: one.stats.replay_waiting == 0, "their end")


@both_loops
async def test_replay_servers_of_an_output_share_its_sessions(context):
    async with (
        served(4_000, payload=b"p" * 4_000, sessions=1) as one,
        served(50, beside=one) as two,
    ):
        assert one.stats.replay_waiting_limit == 2 * MAX_WAITING
        clients = [requester(context, each) for each in (one, two, one, two)]
        await asyncio.gather(*(client.drain() for client in clients))
        assert [len(client.seqs()) for client in clients] == [4_000, 50, 4_000, 50]
        await eventually(lambda: one.outcomes == {"complete": 4}, "their outcomes")
        assert (one.stats.replay_sessions, one.stats.replay_waiting) == (0, 0)
        for client in clients:
            client.close()


@both_loops
async def test_replay_requests_beyond_the_maximum_are_refused_and_counted(context, monkeypatch):
    monkeypatch.setattr(replay_module, "MAX_WAITING", 3)
    async with served(4_000, payload=b"p" * 4_000) as one:
        with never_reading(one, 3):
            refused = False
            while not refused:  # as long as their kernels accept data, kvbus refuses nothing
                await eventually(lambda: one.stats.replay_waiting == 3, "three that do not read")
                client = requester(context, one)
                await client.drain()
                refused = not client.seqs()
                client.close()
            await eventually(lambda: one.outcomes.get("refused") == 1, "its outcome")
        await eventually(lambda: one.server.busy == 0, "room again")
        client = requester(context, one)
        await client.drain()
        assert len(client.seqs()) == 4_000
        client.close()


@both_loops
async def test_the_end_of_a_refused_request_comes_after_the_answer_before_it(context, monkeypatch):
    """If kvbus refuses a second request on a connection, its END comes after the END of the answer that is being
    sent.
    """
    monkeypatch.setattr(replay_module, "MAX_WAITING", 1)
    async with served(300) as one, bare(one.endpoint, DEALER + request() * 3) as (reader, _):
        await reader.readexactly(64 + 30)
        data = b"".join(encode_message([b"", b"kv@a@m", u64(n), b"payload"]) for n in range(300))
        end = encode_message([b"", b"", END, b""])
        expected = 2 * (data + end) + end  # the first request is answered, the second waits, the third is refused
        assert await reader.readexactly(len(expected)) == expected
        await eventually(lambda: one.outcomes == {"complete": 2, "refused": 1}, "their outcomes")


@both_loops
async def test_an_answer_for_a_disconnected_client_is_counted(context):
    class Late(Served):
        """A replay server whose relay answers after the client has disconnected."""

        kept = None

        def on_request(self, frames):
            self.asked += 1
            self.kept = frames

    async with served(3, kind=Late) as one:
        async with bare(one.endpoint, DEALER + request()) as (reader, writer):
            await eventually(lambda: one.kept, "its request")
            writer.write_eof()
            await reader.read()  # read until the server has closed the connection
        listener_sees = len(one.kept[0])
        assert listener_sees == 8
        Served.on_request(one, one.kept)
        assert one.outcomes == {"gone": 1}


@both_loops
async def test_failed_handshakes_and_large_requests_are_counted(context):
    async with served(3, policy=PeerPolicy(max_frame_bytes=1_024)) as one:
        async with bare(one.endpoint, b"GET / HTTP/1.1\r\n\r\n"):
            await eventually(lambda: one.stats.refused[Reason.GREETING] == 1, "another protocol")
        async with bare(one.endpoint, hello(b"SUB")):
            await eventually(lambda: one.stats.refused[Reason.SOCKET_TYPE] == 1, "another socket type")
        async with bare(one.endpoint, DEALER + encode_message([b"x" * 1_025])) as (reader, _):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        assert one.asked == 0


@both_loops
async def test_an_answer_that_takes_long_to_build_does_not_block_the_loop(context):
    class Slow(Served):
        def answer(self, request):
            return Making(super().answer(request))

    class Making:
        """A snapshot that takes long to build: many empty slices, then one message."""

        def __init__(self, inner):
            self.envelope, self.outcome, self.finished = inner.envelope, "compacted", False

        def messages(self):
            for _ in range(200_000):
                yield []
            self.finished = True
            yield [self.envelope[0], b"", END, b""]

    async with served(1, kind=Slow) as one:
        client = requester(context, one)
        longest = 0.0
        while not client.read():
            at = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - at)
        assert longest < 0.1
        await eventually(lambda: one.outcomes == {"compacted": 1}, "its outcome")
        client.close()
