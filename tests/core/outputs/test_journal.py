import pytest

from kvbus.core.outputs.journal import RUNS, RUNS_BYTES, SPARE, Entry, Journal


def filled(count, *, max_batches=100, max_bytes=10_000, size=10):
    journal = Journal(max_batches, max_bytes)
    for seq in range(count):
        journal.append(seq, bytes(size))
    return journal


def seqs(journal):
    first = journal.position(0)
    return [journal.at(first + i).seq for i in range(len(journal))]


def test_a_new_journal_has_nothing():
    journal = Journal(10, 10)
    assert (len(journal), journal.first_seq, journal.bytes, journal.at(journal.position(0))) == (0, None, 0, None)


@pytest.mark.parametrize(("appended", "first"), [(1, 0), (100, 0), (101, 1), (250, 150)])
def test_the_oldest_batches_go_at_the_limit_of_batches(appended, first):
    journal = filled(appended)
    assert journal.first_seq == first
    assert seqs(journal) == list(range(first, appended))


def test_the_oldest_batches_go_at_the_limit_of_bytes():
    journal = filled(50, max_bytes=100)
    assert journal.bytes == 100
    assert seqs(journal) == list(range(40, 50))


def test_the_newest_batch_stays_however_large():
    journal = filled(5, max_bytes=100)
    journal.append(5, bytes(1000))
    assert (journal.first_seq, journal.bytes, len(journal)) == (5, 1000, 1)
    journal.append(6, bytes(10))
    assert (journal.first_seq, journal.bytes, len(journal)) == (6, 10, 1)


class TestEmptyBatches:
    def test_a_run_of_them_is_one_entry(self):
        journal = filled(3)
        for seq in range(3, 1003):
            journal.append(seq, b"empty", empty=True)
        assert len(journal) == 4
        assert journal.bytes == 35
        assert journal.at(journal.position(500)) == Entry(3, b"empty", 1000, True)

    def test_a_batch_ends_the_run(self):
        journal = filled(1)
        journal.append(1, b"empty", empty=True)
        journal.append(2, b"full")
        journal.append(3, b"empty", empty=True)
        assert [(entry.seq, entry.batches) for entry in map(journal.at, range(4))] == [(0, 1), (1, 1), (2, 1), (3, 1)]

    def test_an_idle_night_does_not_push_out_the_day(self):
        journal = filled(100)
        for seq in range(100, 100_000):
            journal.append(seq, b"e", empty=True)
        assert (journal.first_seq, len(journal)) == (1, 100)

    def test_a_run_that_was_trimmed_is_no_run_of_the_entry_in_its_place(self):
        journal = Journal(2, 10_000)
        for seq in range(10):
            journal.append(seq, b"x", empty=seq % 3 == 0)
        assert [(entry.seq, entry.empty) for at in (8, 9) if (entry := journal.at(at))] == [(8, False), (9, True)]
        assert journal.beat == b"x"
        journal.append(10, b"full")
        assert journal.beat is None


class TestPositions:
    def test_numbers_are_right_before_and_after_those_that_are_gone_were_let_go(self):
        journal = Journal(3, 10_000)
        for seq in range(0, 5 * SPARE, 2):
            journal.append(seq, b"x")
            assert journal.first_seq == max(0, seq - 4)
            assert seqs(journal) == list(range(max(0, seq - 4), seq + 1, 2))

    def test_positions_do_not_change_when_the_journal_trims(self):
        journal = filled(100)
        position = journal.position(60)
        for seq in range(100, 150):
            journal.append(seq, b"x")
        assert journal.at(position).seq == 60
        assert journal.position(60) == position

    def test_a_trimmed_position_gives_the_oldest_entry(self):
        journal = filled(100)
        position = journal.position(10)
        for seq in range(100, 150):
            journal.append(seq, b"x")
        assert journal.at(position).seq == 50
        assert journal.at(journal.position(10)).seq == 50

    def test_past_the_end_there_is_nothing(self):
        journal = filled(10)
        assert journal.at(journal.position(9) + 1) is None
        assert journal.at(10**9) is None

    def test_a_seq_past_the_end_is_at_the_newest_entry(self):
        journal = filled(10)
        assert journal.at(journal.position(10**9)).seq == 9

    def test_a_seq_inside_a_run_is_at_the_run(self):
        journal = filled(5)
        for seq in range(5, 20):
            journal.append(seq, b"", empty=True)
        journal.append(20, b"x")
        assert {journal.at(journal.position(seq)).seq for seq in range(5, 20)} == {5}
        assert journal.at(journal.position(20)).seq == 20


def expanded(runs):
    return [(seq, payload) for first, payload, count in runs for seq in range(first, first + count)]


def all_of(journal, seq, end):
    """Every batch, given a few at a time; and how many were given at most."""
    found: list[tuple[int, bytes]] = []
    most = 0
    while runs := journal.runs(seq + len(found), end):
        assert expanded(runs)[0][0] == seq + len(found)
        found += expanded(runs)
        most = max(most, len(runs))
    return found, most


def test_runs_are_given_a_few_at_a_time_from_the_middle_of_one_on():
    journal = Journal(1000, 10**6)
    for seq in range(300):
        empty = seq % 10 > 5
        journal.append(seq, b"beat" if empty else b"batch %d" % seq, empty=empty)
    found, most = all_of(journal, 8, 297)
    assert found == [(seq, b"beat" if seq % 10 > 5 else b"batch %d" % seq) for seq in range(8, 297)]
    assert most == RUNS


def test_a_large_batch_is_given_alone():
    journal = filled(10, max_bytes=10**6, size=RUNS_BYTES)
    assert [len(journal.runs(seq, 10)) for seq in range(11)] == [1] * 10 + [0]


@pytest.mark.parametrize("seq", [0, 4, 10, 11, 2**64 - 1])
def test_what_is_not_kept_is_not_given(seq):
    assert filled(10, max_batches=5).runs(seq, 2**64) == []
    assert filled(0).runs(seq, 2**64) == []
