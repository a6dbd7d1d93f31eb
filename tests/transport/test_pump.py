"""Tests for the message pump, which reads a libzmq socket whose descriptor signals only changes (edge-triggered).

No message may wait until the next one arrives.
"""

import asyncio
import contextlib
from typing import Any

import pytest
import zmq

from kvbus.transport.pump import CAP, MAX_KEPT_FRAMES, Pump, receive
from tests.doubles.bus import PATIENCE, eventually
from tests.transport.loops import both_loops, turns


class Pair:
    """Two connected PAIR sockets. The pump reads `mine`; the test sends and reads on `theirs`."""

    def __init__(self, context):
        self.mine = context.socket(zmq.PAIR)
        self.theirs = context.socket(zmq.PAIR)
        for one in (self.mine, self.theirs):
            one.setsockopt(zmq.SNDHWM, 0)
            one.setsockopt(zmq.RCVHWM, 0)
            one.setsockopt(zmq.LINGER, 0)
        port = self.mine.bind_to_random_port("tcp://127.0.0.1")
        self.theirs.connect(f"tcp://127.0.0.1:{port}")

    def close(self):
        self.theirs.close()


@contextlib.asynccontextmanager
async def pumped(context, handler, **options):
    pair = Pair(context)
    pump = Pump(pair.mine, handler, **options)
    try:
        yield pair, pump
    finally:
        pump.close()
        pair.close()
        await turns()


@both_loops
async def test_a_pump_reads_messages_from_before_and_after_its_start(context):
    pair = Pair(context)
    for n in range(10):
        pair.theirs.send(b"%d" % n)
    assert pair.mine.poll(60_000)  # the edge event happens before the pump exists
    got: list[Any] = []
    pump = Pump(pair.mine, got.append)
    await eventually(lambda: len(got) == 10, "what waited before the pump began")
    for n in range(10, 20):
        pair.theirs.send(b"%d" % n)
    await eventually(lambda: len(got) == 20, "what came later")
    assert got == [[b"%d" % n] for n in range(20)]
    pump.close()
    pair.close()
    await turns()


@both_loops
async def test_a_pump_that_reaches_its_cap_continues_in_the_next_iteration(context):
    """If more messages wait than the pump may read in one iteration of the event loop, it continues in the next one.

    Other callbacks run in between. The pump needs no new signal of the descriptor to continue.
    """
    got = []
    other = []
    pair = Pair(context)
    count = 4 * CAP + 1
    for _ in range(count):
        pair.theirs.send(b"x")
    pair.theirs.send(b"last")
    await eventually(lambda: pair.mine.getsockopt(zmq.EVENTS) & zmq.POLLIN, "the first message")
    loop = asyncio.get_running_loop()

    def handler(frames):
        got.append(frames)
        if len(got) % CAP == 1:
            loop.call_soon(lambda: other.append(len(got)))

    pump = Pump(pair.mine, handler)
    await eventually(lambda: got[-1:] == [[b"last"]], "everything beyond the cap")
    assert len(got) == count + 1
    # the callback was registered at the first message of an iteration, and ran before the pump read twice the cap
    assert all(ran <= at * CAP + CAP for at, ran in enumerate(other))
    pump.close()
    pair.close()
    await turns()


@both_loops
async def test_a_handler_that_raises_loses_only_its_message(context, raised):
    got = []

    def handler(frames):
        got.append(frames[0])
        if frames[0] == b"bad":
            raise ValueError(frames[0])

    async with pumped(context, handler) as (pair, pump):
        for word in (b"a", b"bad", b"b", b"bad", b"bad", b"c"):
            pair.theirs.send(word)
        await eventually(lambda: got[-1:] == [b"c"], "what came behind the bad ones")
        assert got == [b"a", b"bad", b"b", b"bad", b"bad", b"c"]
        assert [str(error) for error in raised] == ["b'bad'"] * 3
        raised.clear()
        assert not pump.closed
        pair.theirs.send(b"d")
        await eventually(lambda: got[-1:] == [b"d"], "a message by a later edge")


@both_loops
async def test_a_kicked_pump_reads_messages_whose_signal_a_send_consumed(context):
    """After a send on the same socket, `kick` makes the pump read the messages that have arrived.

    During the send, libzmq processes these messages. After that, the socket's descriptor does not signal them any more.
    """
    got: list[Any] = []
    async with pumped(context, got.append) as (pair, pump):
        for n in range(50):
            pair.theirs.send(b"%d" % n)
            # no await here: the loop must not see the edge before the send below, or the read of EVENTS, has consumed
            # it
            end = asyncio.get_running_loop().time() + PATIENCE
            while not pair.mine.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                assert asyncio.get_running_loop().time() < end
            pair.mine.send(b"answer")
            pump.kick()
            await eventually(lambda n=n: len(got) == n + 1, f"message {n}, whose edge is gone")


@both_loops
async def test_a_pump_does_not_read_a_message_without_signal_or_kick(context):
    """If libzmq has processed an arrived message during another call, the pump reads it only after `kick`.

    This proves that the test with `kick` can fail.
    """
    got: list[Any] = []
    async with pumped(context, got.append) as (pair, pump):
        await turns(5)  # let the pump finish its first check of the socket
        pair.theirs.send(b"x")
        end = asyncio.get_running_loop().time() + PATIENCE
        while not pair.mine.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            assert asyncio.get_running_loop().time() < end
        await turns(50)
        assert got == []
        pump.kick()
        pump.kick()  # a second kick must do nothing
        await eventually(lambda: got == [[b"x"]], "the message, once kicked")


@both_loops
async def test_a_pump_reads_a_message_whose_signal_look_consumed(context):
    got: list[Any] = []
    async with pumped(context, got.append) as (pair, pump):
        await turns()
        for _ in range(5):
            got.clear()
            pair.theirs.send(b"seen")
            assert pair.mine.poll(60_000)
            assert pump.look()
            await eventually(lambda: got == [[b"seen"]], "what was seen")
            assert not pump.look()
    assert not pump.look(), "it is closed"


@both_loops
async def test_a_handler_may_answer_on_the_same_socket(context):
    answered: list[Any] = []
    pair = Pair(context)
    pump: Pump

    def handler(frames):
        pair.mine.send(frames[0])
        pump.kick()

    pump = Pump(pair.mine, handler)
    other = Pump(pair.theirs, answered.append)
    for n in range(2000):
        pair.theirs.send(b"%d" % n)
        other.kick()
    await eventually(lambda: len(answered) == 2000, "every answer")
    assert answered == [[b"%d" % n] for n in range(2000)]
    pump.close()
    other.close()
    await turns()


@both_loops
@pytest.mark.parametrize("kept", [MAX_KEPT_FRAMES, 3 * MAX_KEPT_FRAMES])
async def test_a_pump_keeps_a_bounded_number_of_frames_and_reports_the_total(context, kept):
    """The pump keeps only the first frames of a huge message. It takes none of the dropped frames for the next
    message.
    """
    got: list[Any] = []
    async with pumped(context, got.append, max_frames=kept) as (pair, _):
        for frames in (1, 3, 2 * MAX_KEPT_FRAMES, 50_000, 1):
            pair.theirs.send_multipart([b"%d" % n for n in range(frames)])
        pair.theirs.send_multipart([b"", b"", b""])
        await eventually(lambda: len(got) == 6, "all messages")
        assert [len(frames) for frames in got] == [1, 3, min(kept, 2 * MAX_KEPT_FRAMES), kept, 1, 3]
        assert got[3] == [b"%d" % n for n in range(kept)]
        assert got[4:] == [[b"0"], [b"", b"", b""]]  # no frame of the huge message may count as the next message


@both_loops
@pytest.mark.parametrize("raises", [False, True])
async def test_a_handler_may_close_its_pump(context, raised, raises):
    got = []
    pair = Pair(context)
    pump: Pump

    def handler(frames):
        got.append(frames[0])
        if frames[0] == b"stop":
            pump.close()
            if raises:
                raise ValueError("and out")

    for word in (b"a", b"stop", b"never"):
        pair.theirs.send(word)
    await eventually(lambda: pair.mine.getsockopt(zmq.EVENTS) & zmq.POLLIN, "a message before the pump begins")
    pump = Pump(pair.mine, handler)
    await eventually(lambda: pump.closed, "the end")
    pump.kick()
    pump.close()
    await turns()
    assert [str(error) for error in raised] == ["and out"] * raises
    raised.clear()
    assert got == [b"a", b"stop"]
    assert pair.mine.closed
    pair.close()


@both_loops
async def test_pumps_with_reused_descriptors_get_only_their_own_messages(context):
    """No pump gets or misses events of another socket, although the sockets are opened and closed quickly.

    The kernel gives a new socket the descriptor number of a closed one.
    """
    fds = set()
    for n in range(60):
        got: list[Any] = []
        pair = Pair(context)
        fds.add(pair.mine.FD)
        pump = Pump(pair.mine, got.append)
        pair.theirs.send(b"%d" % n)
        if n % 3:  # sometimes close the socket while a message has not arrived
            await eventually(lambda got=got: got, f"the message of socket {n}")
            assert got == [[b"%d" % n]]
        pump.close()
        pair.close()
        await turns(2)
        assert pair.mine.closed
    assert len(fds) < 60, "no descriptor was ever used twice: this test shows nothing"


@both_loops
async def test_pumps_closed_in_the_iteration_of_their_start_disturb_no_other_pump(context):
    keeper: list[Any] = []
    async with pumped(context, keeper.append) as (pair, _):
        for _ in range(20):
            pairs = [Pair(context) for _ in range(3)]
            pumps = [Pump(pair.mine, keeper.append) for pair in pairs]
            for short, pump in zip(pairs, pumps, strict=True):
                pump.close()
                short.close()
            await turns(2)
        pair.theirs.send(b"still here")
        await eventually(lambda: keeper == [[b"still here"]], "the one that stayed")


def test_receive_returns_one_message_or_raises_zmq_again(context):
    pair = Pair(context)
    with contextlib.suppress(zmq.Again):
        receive(pair.mine)
        raise AssertionError("there was nothing to receive")
    pair.theirs.send_multipart([b"a", b"b"])
    assert pair.mine.poll(60_000)
    assert receive(pair.mine) == [b"a", b"b"]
    pair.mine.close()
    pair.close()


@both_loops
async def test_the_socket_of_a_closed_pump_closes_one_iteration_later(context):
    """The socket of a closed pump is closed one iteration of the event loop later.

    The loop may hold an event for its descriptor, and a new socket might get the same descriptor number.
    """
    pair = Pair(context)
    pump = Pump(pair.mine, print)
    pump.close()
    assert not pair.mine.closed
    await turns()
    assert pair.mine.closed
    pair.close()


@both_loops
async def test_a_pump_closes_if_its_context_destroys_the_socket(context):
    loop, raised = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _loop, what: raised.append(what["exception"]))
    own = zmq.Context()
    pump = Pump(own.socket(zmq.PAIR), lambda frames: None)
    await turns()
    own.destroy(0)
    pump.kick()
    await turns()
    assert pump.closed
    assert len(raised) == 1


@both_loops
async def test_a_deferred_call_runs_after_waiting_messages_and_earlier_calls(context):
    order: list[Any] = []
    async with pumped(context, lambda frames: order.append(int(frames[0]))) as (pair, pump):
        await turns(5)  # let the pump finish its first check of the socket
        pump.call_behind(lambda: order.append("at once"))
        assert order == ["at once"]
        for n in range(3 * CAP):
            pair.theirs.send(b"%d" % n)
        assert pair.mine.poll(60_000)
        pump.call_behind(lambda: order.append("first"))
        pump.call_behind(lambda: order.append("second"))
        await eventually(lambda: len(order) == 3 * CAP + 3, "all messages, and both calls")
        assert order[order.index("first") + 1] == "second"
        assert order.index("first") > order.index(0)
        assert [each for each in order if isinstance(each, int)] == list(range(3 * CAP))


@both_loops
async def test_a_deferred_call_runs_even_if_messages_never_pause(context):
    got: list[Any] = []
    called: list[int] = []

    def handler(frames):
        got.append(frames)
        if not called:
            pair.theirs.send(b"another")

    async with pumped(context, handler) as (pair, pump):
        pair.mine.setsockopt(zmq.RCVHWM, 10)
        for _ in range(10 * CAP):
            pair.theirs.send(b"one")
        assert pair.mine.poll(60_000)
        pump.call_behind(lambda: called.append(len(got)))
        await eventually(lambda: called, "the call")
        await eventually(lambda: len(got) >= 10 * CAP + called[0], "every message")


@both_loops
async def test_a_paused_pump_reads_messages_only_after_it_resumes(context):
    got: list[Any] = []
    order: list[str] = []
    async with pumped(context, got.append) as (pair, pump):
        pump.pause()
        pair.theirs.send(b"1")
        assert pair.mine.poll(60_000)
        pump.call_behind(lambda: order.append(f"after {len(got)}"))
        await turns()
        assert (got, order) == ([], [])
        pair.theirs.send(b"2")
        pump.resume()
        await eventually(lambda: len(got) == 2, "both messages")
        await eventually(lambda: order in (["after 1"], ["after 2"]), "what waited behind the first")


@both_loops
async def test_a_paused_pump_does_not_read_a_message_after_its_poll(context, monkeypatch):
    got: list[Any] = []
    looks: list[bool] = []
    look = zmq.zmq_poll
    async with pumped(context, got.append) as (pair, pump):

        def looked(sockets, timeout):
            found = look(sockets, timeout)
            if not looks:
                pair.theirs.send(b"1")
                assert pair.mine.poll(60_000)
            looks.append(bool(found))
            return found

        pump.pause()
        pump.kick()
        monkeypatch.setattr(zmq, "zmq_poll", looked)
        await turns()
        assert looks[0] is False
        assert got == []
        pump.resume()
        await eventually(lambda: got == [[b"1"]], "the message")
