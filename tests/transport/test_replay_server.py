"""Tests for the replay server with real clients of different speeds.

No client delays another, and each answer ends with END.
"""

from itertools import islice

import pytest
import zmq

from kvbus.core.outputs.snapshot import Unfinished
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import removed, store
from tests.doubles.router import PlainSetRouter
from tests.transport.bare import dialled
from tests.transport.loops import END, both_loops, turns, u64
from tests.transport.replaying import Requester, Served, requester, served


@both_loops
@pytest.mark.parametrize(
    ("profile", "framing"), [("vllm", 4), ("dynamo", 4), ("llm-d", 4), ("aibrix", 4), ("sglang", 3)]
)
async def test_every_replay_request_gets_its_batches_and_end(context, profile, framing):
    head = [b"", b"kv@a@m"] if framing == 4 else [b""]
    end = [b"", b"", END, b""] if framing == 4 else [b"", END, b""]
    async with served(3, profile=profile) as one:
        client = Requester(context, one.endpoint)
        for start, expected in ((0, [0, 1, 2]), (2, [2]), (3, []), (10**9, []), (2**63, []), (2**64 - 1, [])):
            client.got.clear()
            client.ask(start)
            await eventually(client.read, f"the END of the answer from {start}")
            assert client.got == [*([*head, u64(seq), b"payload"] for seq in expected), end]
        await eventually(lambda: one.outcomes == {"complete": 6}, "its outcomes")
        assert one.stats.replay_batches == 10
        assert one.stats.replay_sessions == 0
        client.close()


@both_loops
async def test_a_client_with_a_low_high_water_mark_loses_no_batch(context):
    async with served(5000, payload=b"p" * 500) as one:
        client = requester(context, one, hwm=10, small=True)
        await eventually(lambda: one.stats.replay_batches > 100, "the server well into its answer")
        await client.drain()
        assert client.seqs() == list(range(5000))
        await eventually(lambda: one.outcomes == {"complete": 1}, "its outcomes")
        client.close()


@both_loops
async def test_200_concurrent_clients_get_complete_answers(context):
    async with served(100, sessions=16) as one:
        clients = [requester(context, one) for _ in range(200)]
        await eventually(lambda: min([client.read() for client in clients]), "everybody's END")
        assert all(client.seqs() == list(range(100)) for client in clients)
        await eventually(lambda: one.outcomes == {"complete": 200}, "its outcomes")
        assert one.stats.replay_batches == 200 * 101
        assert one.stats.replay_sessions == 0
        for client in clients:
            client.close()


@both_loops
async def test_the_requests_of_one_client_are_answered_in_order(context):
    """Like an engine, kvbus finishes an answer before it begins the next one on the same connection.

    So the first END belongs to the first request.
    """
    async with served(1000) as one:
        client = Requester(context, one.endpoint)
        other = Requester(context, one.endpoint)
        for start in (0, 500, 990):
            client.ask(start)
        other.ask(0)
        await eventually(lambda: client.read() and sum(f[-2] == END for f in client.got) == 3, "three ENDs")
        numbers = [int.from_bytes(frames[-2], "big") for frames in client.got]
        last = 2**64 - 1
        assert numbers == [*range(1000), last, *range(500, 1000), last, *range(990, 1000), last]
        await eventually(other.read, "the END of somebody else")
        assert other.seqs() == list(range(1000))
        await eventually(lambda: one.outcomes == {"complete": 4}, "its outcomes")
        client.close()
        other.close()


@both_loops
async def test_a_req_client_gets_one_reply_and_may_send_a_new_request(context):
    async with served(50) as one:
        client = Requester(context, one.endpoint, kind=zmq.REQ)
        answers = 0
        for start in (7, 9, 49):
            reply: list[bytes] = []
            while reply != [b"kv@a@m", u64(start), b"payload"]:
                # REQ reads only the first message of an answer. On its next request it drops the messages that have
                # arrived by then. It takes a message that arrives later for its reply, so a REQ client must send the
                # request again
                assert answers < 100
                client.socket.send(u64(start))
                await eventually(lambda: client.socket.poll(0), "the one reply")
                reply = client.socket.recv_multipart()
                answers += 1
                await eventually(lambda: one.stats.replay_sessions == 0, "the rest of the answer sent")
        client.close()


@both_loops
@pytest.mark.parametrize(
    ("request_", "delimiter"),
    [
        ([b""], False),
        ([b"short"], False),
        ([b"", b""], True),
        ([b"", b"short"], True),
        ([b"", b"longer than it should be"], True),
        ([b"", b"snapshot"[:7]], True),
        ([b"", u64(0), b"more"], True),
        ([b"x", u64(0)], False),
        ([b"", *[b"x"] * 200], True),
    ],
)
async def test_a_malformed_request_gets_end_immediately(context, request_, delimiter):
    """A malformed request gets END immediately, so that its client does not hang.

    The next request gets a normal answer.
    """
    async with served(3) as one:
        client = Requester(context, one.endpoint)
        client.socket.send_multipart(request_)
        await client.drain()
        if request_ != [b"x", u64(0)]:  # kvbus accepts an odd delimiter before a valid seq
            head = [b""] if delimiter else []
            assert client.got == [[*head, b"", END, b""]]
            await eventually(lambda: one.outcomes == {"malformed": 1}, "it counted as what it is")
        client.got.clear()
        client.ask(2)
        await client.drain()
        assert client.seqs() == [2]
        client.close()


@both_loops
async def test_a_dealer_without_the_delimiter_gets_an_answer_without_it(context):
    async with served(2) as one:
        client = Requester(context, one.endpoint)
        client.socket.send(u64(0))
        await client.drain()
        assert client.got == [
            [b"kv@a@m", u64(0), b"payload"],
            [b"kv@a@m", u64(1), b"payload"],
            [b"", END, b""],
        ]
        client.close()


class FailsOnce(Served):
    """A replay server whose second answer fails in the middle."""

    def answer(self, request):
        made = super().answer(request)
        return Broken(made) if self.asked == 2 else made


class Broken:
    def __init__(self, inner):
        self.envelope = inner.envelope
        self.outcome = "complete"
        self.finished = False
        self._inner = inner

    def messages(self):
        yield from islice(self._inner.messages(), 4)
        raise ValueError("broken")


@both_loops
async def test_an_answer_that_raises_does_not_stop_other_answers(context, raised):
    async with served(1000, kind=FailsOnce) as one:
        clients = []
        for n in range(4):
            clients.append(requester(context, one))
            await eventually(lambda n=n: one.asked == n + 1, "the request")
        good = [client for at, client in enumerate(clients) if at != 1]
        await eventually(lambda: min([client.read() for client in good]), "the ENDs of the others")
        assert [str(error) for error in raised] == ["broken"]
        raised.clear()
        assert all(client.seqs() == list(range(1000)) for client in good)
        await eventually(lambda: one.outcomes == {"complete": 3, "refused": 1}, "its outcomes")
        assert one.stats.replay_sessions == 0
        for client in clients:
            client.close()


@both_loops
async def test_a_slow_client_gets_a_state_if_the_journal_drops_its_batches(context):
    """If the journal drops the requested batches while a slow client reads them, the client gets a state instead.

    The seqs of the answer have no gap.
    """
    async with (
        running_bus(output={"journal_batches": 200}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: bus.source.state == "live", "the bus in sync")

        def publish(first, last):
            for n in range(first, last):
                events = [store([n], tokens=[n] * 400, block_size=400)]
                if n >= 100:
                    events.append(removed([n - 100]))
                engine.publish(batch(*events))

        publish(0, 200)
        await eventually(lambda: bus.source.sequencer.next == 200, "the first batches relayed")
        client = Requester(context, bus.out_replay, hwm=1, small=True)
        client.ask(0)
        stats = bus.daemon.outputs.stats[0]
        await eventually(lambda: stats.replay_batches, "the answer begun")
        for first in range(200, 6000, 200):
            publish(first, first + 200)
            await eventually(lambda first=first: bus.source.sequencer.next == first + 200, "the next ones relayed")
        await client.drain()
        numbers = client.seqs()
        assert numbers == list(range(len(numbers)))
        router = PlainSetRouter()
        for frames in client.got[:-1]:
            router.apply(int.from_bytes(frames[-2], "big"), frames[-1])
        # the first answer ends here; the later batches are on the live stream and in a second answer
        client.got.clear()
        client.ask(len(numbers))
        await client.drain()
        for frames in client.got[:-1]:
            router.apply(int.from_bytes(frames[-2], "big"), frames[-1])
        assert {key[2] for key in router.blocks} == set(range(5900, 6000))
        assert not [v for v in router.violations if "gap" in v]
        client.close()


class ManyFrameServer(Served):
    """A replay server whose answers are one message each, with many frames."""

    made = None

    def answer(self, request):
        self.made = ManyFrameAnswer(super().answer(request))
        return self.made


class ManyFrameAnswer:
    def __init__(self, inner):
        self.envelope = inner.envelope
        self.outcome = "compacted"
        self.finished = False
        self.left = 100
        self.waits = False
        """Whether kvbus is still building the next part of the message."""

    def messages(self):
        while self.left:
            self.left -= 1
            self.finished = not self.left
            frames = [self.envelope[0], b"x" * 40_000]
            yield frames if self.finished else Unfinished(frames)
            while self.waits:
                yield []

    def refusal(self):
        return [self.envelope[0], b"", END, b""]


@both_loops
async def test_a_message_sent_frame_by_frame_arrives_as_one_message(context):
    async with served(0, kind=ManyFrameServer) as one:
        client = requester(context, one)
        await eventually(lambda: client.read() or client.got, "the message")
        assert client.got == [[b"x" * 40_000] * 100]
        await eventually(lambda: one.outcomes == {"compacted": 1}, "its outcome")
        assert one.stats.replay_batches == 1
        client.close()


class StuckServer(ManyFrameServer):
    """A replay server that never finishes building the next part of its answer."""

    def answer(self, request):
        made = super().answer(request)
        made.waits = True
        return made


@both_loops
@pytest.mark.parametrize(("kind", "pace"), [(ManyFrameServer, 1), (StuckServer, 0)])
async def test_a_message_that_kvbus_cannot_complete_ends_the_connection(kind, pace):
    """kvbus closes the connection if it cannot complete a message of many frames.

    If it sent END instead, the client would read END as a part of the incomplete message.
    """
    async with (
        served(0, kind=kind) as one,
        dialled(int(one.endpoint.rpartition(":")[2]), b"DEALER", pace=pace) as client,
    ):
        client.send(b"", u64(0))
        await eventually(lambda: one.made and 0 < one.made.left < 100, "the answer begun")
        await turns()
        assert one.server.end() == 1
        await eventually(lambda: client.gone, "the end of the connection")
        assert client.messages == []
        assert one.outcomes == {"cut_off": 1}
