"""A peer's topics: a set, bounded in number and size."""

import pytest

from kvbus.transport.zmtp.limits import Limits
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.subscriptions import Subscriptions


def test_topics_are_prefixes():
    topics = Subscriptions(Limits())
    assert not topics.match(b"kv")
    topics.add(b"kv@a")
    topics.add(b"other")
    assert topics.match(b"kv@a@model")
    assert not topics.match(b"kv@b@model")
    assert not topics.match(b"kv")
    topics.add(b"")
    assert topics.match(b"")
    assert topics.match(b"anything")
    topics.remove(b"")
    assert not topics.match(b"anything")


def test_a_repeated_topic_counts_once():
    topics = Subscriptions(Limits())
    assert topics.add(b"a")
    assert not topics.add(b"a")
    assert (len(topics), topics.bytes, list(topics)) == (1, 1, [b"a"])
    assert topics.remove(b"a")
    assert not topics.remove(b"a")
    assert (len(topics), topics.bytes, b"a" in topics) == (0, 0, False)


def test_they_are_bounded():
    topics = Subscriptions(Limits(subscriptions=2, subscription_bytes=10))
    topics.add(b"123456")
    with pytest.raises(ProtocolError) as failed:
        topics.add(b"12345")
    assert failed.value.reason is Reason.SUBSCRIPTION_BYTES
    topics.add(b"1234")
    with pytest.raises(ProtocolError) as failed:
        topics.add(b"")
    assert failed.value.reason is Reason.SUBSCRIPTIONS
    assert (len(topics), topics.bytes) == (2, 10)
    topics.remove(b"123456")
    assert topics.add(b"")
