"""What answers show of a publisher's replay buffer."""

from kvbus.core.sequencing.publisher_buffer import PublisherBuffer


def test_one_empty_answer_proves_nothing():
    buffer = PublisherBuffer()
    buffer.answered_with_nothing(5)
    buffer.answered_with_nothing(5)
    assert buffer.keeps is None


def test_two_with_a_batch_between_show_that_there_is_no_buffer():
    buffer = PublisherBuffer()
    buffer.answered_with_nothing(5)
    buffer.answered_with_nothing(6)
    assert buffer.keeps is False


def test_they_have_to_come_on_one_connection():
    buffer = PublisherBuffer()
    buffer.answered_with_nothing(5)
    buffer.disconnected()
    buffer.answered_with_nothing(6)
    assert buffer.keeps is None


def test_a_trimmed_answer_is_timed_for_as_long_as_the_same_batch_is_waited_for():
    buffer = PublisherBuffer()
    assert buffer.trimmed_for(3, 10.0) == 0.0
    assert buffer.trimmed_for(3, 12.5) == 2.5
    assert buffer.trimmed_for(4, 13.0) == 0.0
    assert buffer.trimmed_for(4, 14.0) == 1.0
