"""A router alone: what it matches, and how it is named to people."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvbus.transport.live.router import Router, say


def router_of(name="", *topics):
    peer: Any = SimpleNamespace(id=1, address="10.0.0.1:1", topics=topics)
    return Router(peer, 3, name)


def test_a_topic_is_matched_by_what_it_begins_with():
    router = router_of("", b"kv@a", b"kv@bc")
    assert [router.matches(topic) for topic in (b"kv@a", b"kv@b", b"kv@bc@m")] == [True, False, True]
    assert router_of("", b"").matches(b"anything")
    assert not router_of().matches(b"")


@pytest.mark.parametrize(
    ("name", "shown", "fields"),
    [("", "10.0.0.1:1", {}), ("blue", "blue (10.0.0.1:1)", {"router": "blue"})],
)
def test_who_has_a_key_is_known_by_its_owner(name, shown, fields, caplog):
    with caplog.at_level(logging.INFO, "kvbus.outputs"):
        say(logging.INFO, "output %s: router %s left: %s", "routers", router_of(name), "closed")
    (record,) = caplog.records
    assert record.message == f"output routers: router {shown} left: closed"
    expected = {"output": "routers", "stream": 3, "peer": "10.0.0.1:1", **fields}
    assert {key: value for key, value in vars(record).items() if key in {*expected, "router"}} == expected
