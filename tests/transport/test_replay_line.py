"""Whose turn it is: those that have shown that they read, and newcomers beside them."""

from types import SimpleNamespace

import pytest

from kvbus.transport.replay_line import ADVANTAGE, NEWCOMERS, Line, WaitingLine


def named(name, *, reads=False):
    return SimpleNamespace(name=name, reads=reads)


def line_of(*requesters, kind=Line):
    line = kind()
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


def test_newcomers_get_a_seventeenth_while_others_read():
    line = line_of(*[named("new") for _ in range(50)], *[named("reads", reads=True) for _ in range(50)])
    names = order(line)
    both = names[:45]
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
    assert order(line, 1000 / ADVANTAGE) == ["new", "reads", "new", "reads"]


def test_one_that_reads_overtakes_newcomers_beyond_the_spared_ones():
    waiting = line_of(named("waits"), named("reads", reads=True), named("reads too", reads=True), kind=WaitingLine)
    sending = line_of(named("new"), named("newer"))
    assert [each.name for each in waiting.overtake(sending, NEWCOMERS)] == ["reads", "newer"]
    assert waiting.overtake(sending, NEWCOMERS) is None
    assert order(waiting) == ["reads too", "waits"]
    assert waiting.overtake(sending, 0) is None


def test_newcomers_are_behind_when_others_have_got_more():
    line = line_of(named("new"), named("reads", reads=True), named("reads too", reads=True))
    assert (line.reading, line.newcomers, line.behind) == (2, 1, False)
    line.next()
    line.charge(1)
    assert line.behind
    assert line.next().name == "new"
    line.charge(1)
    assert not line.behind


def test_newcomers_that_wait_are_taken_from_both_ends():
    line = line_of(*[named(n) for n in range(6)], kind=WaitingLine)
    assert order(line) == [5, 0, 4, 1, 3, 2]


def test_whoever_comes_on_and_on_keeps_nobody_waiting_for_ever():
    line = line_of(*[named(n) for n in range(20)], kind=WaitingLine)
    taken = []
    for n in range(100, 200):
        line.add(named(n))
        taken.append(line.next().name)
        line.add_tried(named("tried"))
    assert set(range(20)) <= set(taken)


def test_of_eight_newcomers_one_was_tried_before():
    line = line_of(*[named(n) for n in range(20)], kind=WaitingLine)
    for n in range(4):
        line.add_tried(named(f"tried {n}"))
    names = order(line)
    assert [names.index(f"tried {n}") for n in range(4)] == [7, 15, 22, 23]


def test_one_that_was_tried_is_taken_out_too():
    line, tried = WaitingLine(), named("tried")
    line.add_tried(tried)
    line.remove(tried)
    assert len(line) == 0
    line.add_tried(tried)
    line.clear()
    assert (len(line), line.newcomers) == (0, 0)


def test_newcomers_join_while_they_have_a_quarter_of_the_places():
    waiting, sending = line_of(named("waits"), kind=WaitingLine), Line()
    for places, most in ((1, 1), (NEWCOMERS, 1), (2 * NEWCOMERS, 2)):
        while sending.newcomers < most:
            assert waiting.admissible(sending, places)
            sending.add(named("new"))
        assert not waiting.admissible(sending, places)
    waiting.add(named("reads", reads=True))
    assert waiting.admissible(sending, 1)
    assert not WaitingLine().admissible(Line(), 64)


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
