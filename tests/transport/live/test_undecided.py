"""What is kept for routers that may yet say that they ask for replays by themselves."""

from kvbus.transport.live.ring import Entry
from kvbus.transport.live.undecided import MOST, Undecided


def burst(*names):
    return [Entry(name, 1, 0.0) for name in names]


def test_each_gets_what_was_published_since_it_came():
    undecided = Undecided()
    undecided.keep(burst(b"0"))
    assert not undecided
    undecided.begin(1)
    undecided.keep(burst(b"1", b"2"))
    undecided.begin(2)
    undecided.keep(burst(b"3"))
    assert undecided
    assert [entry.message for entry in undecided.end(1)] == [b"1", b"2", b"3"]
    assert [entry.message for entry in undecided.end(2)] == [b"3"]
    assert not undecided
    assert undecided.end(1) == []


def test_one_that_missed_too_much_finds_a_gap():
    undecided = Undecided()
    undecided.begin(1)
    undecided.keep(burst(*[b"x"] * MOST))
    undecided.begin(2)
    undecided.begin(3)
    assert len(undecided.end(3)) == 0
    undecided.keep(burst(b"y"))
    assert [len(undecided.end(name)) for name in (1, 2)] == [0, 1]
