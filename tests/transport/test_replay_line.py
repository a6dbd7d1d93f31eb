"""Whose turn it is: those that have shown that they read, and newcomers beside them."""

from types import SimpleNamespace

import pytest

from kvbus.transport.replay_line import ADVANTAGE, Line


def named(name, *, reads=False):
    return SimpleNamespace(name=name, reads=reads)


def line_of(*requesters):
    line = Line()
    for requester in requesters:
        line.add(requester)
    return line


def order(line, amount=1):
    found = []
    while len(line):
        found.append(line.next().name)
        line.charge(amount)
    return found


@pytest.mark.parametrize("reads", [False, True])
def test_alike_they_keep_their_order(reads):
    line = line_of(*[named(n, reads=reads) for n in range(4)])
    line.add(named("first", reads=reads), first=True)
    assert order(line) == ["first", 0, 1, 2, 3]


def test_newcomers_get_a_fifth_while_others_read():
    line = line_of(*[named("new") for _ in range(50)], *[named("reads", reads=True) for _ in range(50)])
    names = order(line)
    both = names[: names.index("reads") + 60]
    assert both.count("new") == pytest.approx(len(both) / (ADVANTAGE + 1), abs=1)
    assert names[-30:] == ["new"] * 30


def test_what_they_get_is_counted_and_not_their_turns():
    line = line_of(named("new"), named("new"), named("reads", reads=True), named("reads", reads=True))
    assert line.next().name == "reads"
    line.charge(40)
    assert line.next().name == "new"
    line.charge(10)
    assert line.next().name == "reads"


def test_nobody_has_an_account_from_when_the_others_were_away():
    line = line_of(*[named("reads", reads=True) for _ in range(4)])
    for _ in range(2):
        line.next()
        line.charge(1000)
    line.add(named("new"))
    line.add(named("new"))
    assert order(line, 250) == ["new", "reads", "new", "reads"]


def test_one_that_reads_overtakes_newcomers_beyond_the_spared_ones():
    waiting = line_of(named("waits"), named("reads", reads=True), named("reads too", reads=True))
    sending = line_of(named("new"), named("newer"))
    assert [each.name for each in waiting.overtake(sending, 1)] == ["reads", "newer"]
    assert waiting.overtake(sending, 1) is None
    assert order(waiting) == ["reads too", "waits"]
    assert waiting.overtake(sending, 0) is None


def test_one_that_leaves_is_taken_out_wherever_it_is():
    new, reads = named("new"), named("reads", reads=False)
    line = line_of(new, reads)
    reads.reads = True  # it was added as a newcomer
    line.remove(reads)
    line.remove(reads)
    line.remove(new)
    assert len(line) == 0
    line.add(reads)
    line.clear()
    assert len(line) == 0
