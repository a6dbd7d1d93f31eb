"""Tests for a reload: the differences between two configurations that it can apply, and those that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.config import Config, FoundRank, FoundSource, SourceConfig, load
from kvbus.daemon.changing import Change, change_to, must_reconnect, only_list
from kvbus.transport.curve import Curve
from kvbus.transport.grants import Client


def one(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "endpoint": f"ipc:///run/{name}", **more}


def config(*sources: dict[str, Any], **settings: Any) -> Config:
    outputs = settings.pop("outputs", [{"endpoint": "ipc:///run/out"}])
    return load(None, env={}, overrides={"sources": list(sources), "outputs": outputs, **settings})


def change(running: Config, wanted: Config, *closed: int) -> Change:
    """Return what a reload of another configuration changes.

    The sources in the ``closed`` slots have no connection.
    """
    return change_to(running, wanted, lambda slot: slot not in closed)


def labels(found: Change) -> tuple[list[str], list[str], list[int]]:
    return [s.label for s in found.added], [s.label for s in found.changed], list(found.removed)


def test_the_same_sources_are_no_change() -> None:
    assert labels(change(config(one("a"), one("b")), config(one("a"), one("b")))) == ([], [], [])


def test_sources_come_and_go() -> None:
    running = config(one("a"), one("b"), one("c"))
    wanted = config(one("a"), one("c", slot=2), one("d", slot=3), one("e", slot=4))
    found = change(running, wanted)
    assert labels(found) == (["d", "e"], [], [1])
    assert found.config is wanted


def test_another_publisher_in_a_slot_is_a_change_of_it() -> None:
    found = change(config(one("a"), one("b")), config(one("a"), one("b", endpoint="ipc:///run/other")))
    assert labels(found) == ([], ["b"], [])
    assert [s.endpoint for s in found.replaced] == ["ipc:///run/other"]


def test_a_source_that_stands_elsewhere_in_the_list_is_the_same() -> None:
    found = change(config(one("a"), one("b")), config(one("b", slot=1), one("a", slot=0)))
    assert labels(found) == ([], [], [])


def test_a_source_without_a_connection_is_opened_again() -> None:
    running = config(one("a"), one("b"))
    assert labels(change(running, running, 1)) == ([], ["b"], [])


def test_each_rank_is_compared() -> None:
    two = one("a", data_parallel_size=2)
    assert labels(change(config(one("a")), config(two))) == (["a/1"], ["a/0"], [])


def allowed(*keys: bytes) -> dict[bytes, Client]:
    return dict.fromkeys(keys, Client())


KEYS = Curve(b"p" * 40, b"s" * 40, clients=allowed(b"a"))


@pytest.mark.parametrize(
    ("before", "now", "must"),
    [
        (None, None, False),
        (None, KEYS, True),
        (KEYS, None, True),
        (KEYS, KEYS, False),
        (KEYS, Curve(b"p" * 40, b"s" * 40, clients=allowed(b"a", b"b")), False),
        (KEYS, Curve(b"p" * 40, b"s" * 40, clients=allowed(b"b")), True),
        (KEYS, Curve(b"q" * 40, b"t" * 40, clients=allowed(b"a")), True),
    ],
)
def test_who_must_show_a_key_again(before: Curve | None, now: Curve | None, must: bool) -> None:
    assert must_reconnect(before, now) is must


OTHER_LIST = Curve(b"p" * 40, b"s" * 40, clients=allowed(b"b"))


@pytest.mark.parametrize(
    ("before", "now", "only"),
    [
        (None, None, False),
        (None, KEYS, False),
        (KEYS, None, False),
        (KEYS, KEYS, False),
        (KEYS, OTHER_LIST, True),
        (KEYS, Curve(b"q" * 40, b"s" * 40, clients=allowed(b"b")), False),
        (KEYS, Curve(b"p" * 40, b"s" * 40, server=b"x" * 40, clients=allowed(b"b")), False),
    ],
)
def test_another_list_alone(before: Curve | None, now: Curve | None, only: bool) -> None:
    assert only_list(before, now) is only


def found(name: str, port: int, replay: int | None = None, where: str = "dns") -> FoundSource:
    rank = FoundRank(0, f"tcp://a:{port}", None if replay is None else f"tcp://a:{replay}")
    return FoundSource.model_construct(**{**dict(SourceConfig()), "name": name, "ranks": (rank,), "where": where})


def with_source(source: FoundSource) -> Config:
    return config(one("a")).model_copy(update={"sources": (source,)})


def test_a_found_engine_at_another_address_has_moved_and_is_no_other_one() -> None:
    change = change_to(with_source(found("a", 1, 2)), with_source(found("a", 3, 4)), lambda _slot: True)
    assert labels(change) == ([], [], [])
    assert [stream.endpoint for stream in change.moved] == ["tcp://a:3"]


def test_a_found_engine_that_is_found_elsewhere_at_the_same_address_is_no_change() -> None:
    change = change_to(with_source(found("a", 1)), with_source(found("a", 1, where="file")), lambda _slot: True)
    assert (labels(change), change.moved) == (([], [], []), ())


@pytest.mark.parametrize("other", [found("b", 3, 4), found("a", 1)])
def test_another_name_or_another_way_to_ask_is_another_source(other: FoundSource) -> None:
    change = change_to(with_source(found("a", 1, 2)), with_source(other), lambda _slot: True)
    assert (labels(change), change.moved) == (([], [other.name], []), ())
