"""What answers show of a publisher's replay buffer."""

import pytest

from kvbus.core.sequencing.publisher_buffer import LONGEST, PublisherBuffer

TIMEOUT = 2.0


def test_one_empty_answer_proves_nothing():
    buffer = PublisherBuffer(TIMEOUT)
    buffer.answered_with_nothing(5)
    buffer.answered_with_nothing(5)
    assert buffer.keeps is None


def test_two_with_a_batch_between_show_that_there_is_no_buffer():
    buffer = PublisherBuffer(TIMEOUT)
    buffer.answered_with_nothing(5)
    buffer.answered_with_nothing(6)
    assert buffer.keeps is False


def test_they_have_to_come_on_one_connection():
    buffer = PublisherBuffer(TIMEOUT)
    buffer.answered_with_nothing(5)
    buffer.disconnected()
    buffer.answered_with_nothing(6)
    assert buffer.keeps is None


def test_a_trimmed_answer_is_timed_for_as_long_as_the_same_batch_is_waited_for():
    buffer = PublisherBuffer(TIMEOUT)
    assert not buffer.has_lost(3, 10.0)
    assert not buffer.has_lost(3, 13.9)
    assert not buffer.has_lost(4, 14.0)
    assert not buffer.has_lost(4, 17.9)
    assert buffer.has_lost(4, 18.0)


def test_what_waits_to_be_read_is_not_late():
    buffer = PublisherBuffer(TIMEOUT)
    for now in (10.0, 14.0, 18.0):
        buffer.unread()
        assert not buffer.has_lost(3, now)
    assert not buffer.has_lost(3, 21.9)
    assert buffer.has_lost(3, 22.0)


@pytest.mark.parametrize(("since", "lost_at"), [(99.0, 104.0), (97.0, 105.0), (80.0, 122.0), (-100.0, 102.0 + LONGEST)])
def test_a_stream_that_was_silent_for_long_has_as_long_again(since, lost_at):
    buffer = PublisherBuffer(TIMEOUT)
    buffer.silent(3, since)
    buffer.silent(3, 99.5)  # asked once more about the same silence
    for now in (100.0, lost_at - 0.1):
        assert not buffer.has_lost(3, now)
    assert buffer.has_lost(3, lost_at)


def test_a_silence_before_another_batch_does_not_count():
    buffer = PublisherBuffer(TIMEOUT)
    buffer.silent(3, 0.0)
    assert not buffer.has_lost(4, 100.0)
    assert buffer.has_lost(4, 104.0)


@pytest.mark.parametrize(("seconds", "lost_at"), [(1.0, 14.0), (10.0, 20.0), (3600.0, 10.0 + LONGEST)])
def test_after_a_pause_of_this_process_it_has_as_long(seconds, lost_at):
    buffer = PublisherBuffer(TIMEOUT)
    buffer.stood_still(seconds, 8.0)
    buffer.stood_still(0.3, 9.0)
    for now in (10.0, lost_at - 0.1):
        assert not buffer.has_lost(3, now)
    assert buffer.has_lost(3, lost_at)
