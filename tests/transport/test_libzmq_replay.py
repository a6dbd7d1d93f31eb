"""What the replay server on libzmq does with requesters that do not read: each keeps its session until it is stalled."""

from kvbus.core.stats import OutputStats
from kvbus.transport import libzmq_replay
from kvbus.transport.libzmq_replay import MAX_WAITING
from kvbus.transport.replay_budget import Budget
from tests.transport.loops import both_loops, eventually
from tests.transport.replaying import requester, served


@both_loops
async def test_a_requester_that_stops_reading_delays_nobody(context):
    """A handful of them, as many as there may be sessions but one."""
    async with served(context, 4000, payload=b"p" * 4000, sessions=5, own=False) as one:
        stalled = [requester(context, one, hwm=1, small=True) for _ in range(4)]
        await eventually(lambda: one.asked == 4, "their requests")
        for _ in range(3):
            client = requester(context, one)
            await client.drain()
            assert client.seqs() == list(range(4000))
            client.close()
        assert one.outcomes == {"complete": 3}
        assert one.stats.replay_sessions == 4
        for client in stalled:  # they only took their time
            await client.drain()
            assert client.seqs() == list(range(4000))
            client.close()
        await eventually(lambda: one.stats.replay_sessions == 0, "no session left")
        assert one.outcomes == {"complete": 7}


@both_loops
async def test_whoever_takes_nothing_for_too_long_is_forgotten(context):
    async with served(context, 4000, payload=b"p" * 4000, sessions=1, stall_timeout=0.05, own=False) as one:
        stalled = requester(context, one, hwm=1, small=True)
        await eventually(lambda: one.asked == 1, "its request")
        stalled.ask()
        stalled.ask(3999)  # these go with the first one
        client = requester(context, one)
        await client.drain()
        assert client.seqs() == list(range(4000))
        assert one.outcomes == {"stalled": 3, "complete": 1}
        assert one.stats.replay_sessions == 0
        client.close()
        stalled.close()


@both_loops
async def test_the_servers_of_an_output_share_its_sessions(context):
    """One stream's slow requesters use the budget up; the other stream's requests wait, and have their turn."""
    budget = Budget(2, OutputStats())
    async with (
        served(context, 4000, payload=b"p" * 4000, budget=budget, own=False) as one,
        served(context, 50, budget=budget, own=False) as two,
    ):
        slow = [requester(context, one, hwm=1, small=True) for _ in range(2)]
        await eventually(lambda: one.asked == 2, "their requests")
        waiting = [requester(context, two) for _ in range(3)]
        await eventually(lambda: two.asked == 3, "the others' requests")
        assert (budget.stats.replay_sessions, budget.stats.replay_sessions_limit) == (2, 2)
        assert (budget.stats.replay_waiting, budget.stats.replay_waiting_limit) == (3, 2 * MAX_WAITING)
        assert not any(client.read() for client in waiting)
        await slow[0].drain()
        await eventually(lambda: min([client.read() for client in waiting]), "everybody's END")
        assert budget.stats.replay_sessions == 1
        await slow[1].drain()
        await eventually(lambda: budget.stats.replay_sessions == 0, "no session left")
        assert budget.stats.replay_waiting == 0
        assert one.outcomes == {"complete": 5}
        for client in (*slow, *waiting):
            client.close()


@both_loops
async def test_a_server_that_closes_gives_its_sessions_back(context):
    budget = Budget(1, OutputStats())
    async with served(context, 50, budget=budget, own=False) as two:
        async with served(context, 4000, payload=b"p" * 4000, budget=budget, own=False) as one:
            slow = requester(context, one, hwm=1, small=True)
            await eventually(lambda: one.stats.replay_sessions == 1, "the slow one's session")
            client = requester(context, two)
            await eventually(lambda: budget.stats.replay_waiting == 1, "the other one waiting")
        await client.drain()
        assert client.seqs() == list(range(50))
        assert budget.stats.replay_sessions == 0
        slow.close()
        client.close()


@both_loops
async def test_requests_beyond_the_bound_are_refused_and_counted(context, monkeypatch):
    monkeypatch.setattr(libzmq_replay, "MAX_WAITING", 3)
    async with served(context, 4000, payload=b"p" * 4000, sessions=1, own=False) as one:
        first = requester(context, one, hwm=1, small=True)
        await eventually(lambda: one.asked == 1, "the one that holds the session")
        others = [requester(context, one) for _ in range(5)]
        await eventually(lambda: one.asked == 6, "the others")
        assert one.outcomes == {"refused": 2}
        await first.drain()
        await eventually(lambda: sum([client.read() for client in others]) == 5, "everybody's END")
        assert one.outcomes == {"refused": 2, "complete": 4}
        assert sorted(len(client.seqs()) for client in others) == [0, 0, 4000, 4000, 4000]
        for client in (first, *others):
            client.close()


@both_loops
async def test_closed_in_the_middle_of_answers(context):
    async with served(context, 4000, payload=b"p" * 4000, sessions=2, own=False) as one:
        clients = [requester(context, one, hwm=1, small=True) for _ in range(4)]
        await eventually(lambda: one.asked == 4, "the requests")
        one.server.close()
        assert one.stats.replay_sessions == 0
        for client in clients:
            client.close()
