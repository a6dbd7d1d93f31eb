"""Places for answers, shared by servers: first come, first served, and none is lost."""

from kvbus.core.stats import OutputStats
from kvbus.transport.replay_budget import Budget


class Server:
    """One that takes a place when it is called, as often as it has something waiting."""

    def __init__(self, budget, waiting=0):
        self.budget = budget
        self.waiting = waiting
        self.places = 0
        self.called = 0

    def free(self):
        self.called += 1

    def admit(self):
        while self.waiting and self.budget.take(self.free):
            self.waiting -= 1
            self.places += 1
        if not self.waiting:
            self.budget.leave(self.free)

    def done(self):
        self.places -= 1
        self.budget.release(1)


def test_places_are_counted():
    stats = OutputStats()
    budget = Budget(2, stats)
    server = Server(budget, 3)
    server.admit()
    assert (server.places, stats.replay_sessions, stats.replay_sessions_limit) == (2, 2, 2)
    server.done()
    assert server.called == 1
    server.admit()
    assert (server.places, stats.replay_sessions) == (2, 2)


def test_nobody_overtakes_whoever_waits():
    budget = Budget(1, OutputStats())
    busy, other = Server(budget, 10), Server(budget, 1)
    busy.admit()
    other.admit()
    busy.done()
    busy.admit()  # it has waited longer
    assert (busy.places, other.places) == (1, 0)
    busy.done()
    busy.admit()  # before the other one had its turn
    assert (busy.places, other.places, other.called) == (0, 0, 1)
    other.admit()
    assert other.places == 1
    other.done()
    assert busy.called == 2
    busy.admit()
    assert busy.places == 1


def test_a_place_that_nobody_needs_any_more_goes_on():
    budget = Budget(1, OutputStats())
    servers = [Server(budget, 1) for _ in range(3)]
    for server in servers:
        server.admit()
    servers[0].done()
    assert [server.called for server in servers] == [0, 1, 0]
    servers[1].waiting = 0  # its requester is gone
    servers[1].admit()
    assert [server.called for server in servers] == [0, 1, 1]
    servers[2].admit()
    assert servers[2].places == 1


def test_several_places_are_handed_out_one_after_the_other():
    budget = Budget(2, OutputStats())
    servers = [Server(budget, 2), Server(budget, 1), Server(budget, 1)]
    for server in servers:
        server.admit()
    servers[0].done()
    servers[0].done()
    servers[1].admit()
    assert servers[2].called == 1
    servers[2].admit()
    assert [server.places for server in servers] == [0, 1, 1]
