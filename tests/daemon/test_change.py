"""Tests for a reload: the differences between two configurations that it can apply, and those that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.config import Config, FoundRank, FoundSource, SourceConfig, load
from kvbus.daemon.changing import Change, change_to, must_reconnect, only_list
from kvbus.transport.curve import Curve
from kvbus.transport.grants import Client


def source_named(name: str, **more: Any) -> dict[str, Any]:
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


def test_a_configuration_with_the_same_sources_changes_nothing() -> None:
    assert labels(
        change(config(source_named("a"), source_named("b")), config(source_named("a"), source_named("b")))
    ) == ([], [], [])


def test_added_and_removed_sources_are_found() -> None:
    running = config(source_named("a"), source_named("b"), source_named("c"))
    wanted = config(source_named("a"), source_named("c", slot=2), source_named("d", slot=3), source_named("e", slot=4))
    found = change(running, wanted)
    assert labels(found) == (["d", "e"], [], [1])
    assert found.config is wanted


def test_a_source_with_another_endpoint_is_replaced() -> None:
    found = change(
        config(source_named("a"), source_named("b")),
        config(source_named("a"), source_named("b", endpoint="ipc:///run/other")),
    )
    assert labels(found) == ([], ["b"], [])
    assert [s.endpoint for s in found.replaced] == ["ipc:///run/other"]


def test_a_source_at_another_position_of_the_list_is_unchanged() -> None:
    found = change(
        config(source_named("a"), source_named("b")), config(source_named("b", slot=1), source_named("a", slot=0))
    )
    assert labels(found) == ([], [], [])


def test_a_source_without_a_connection_is_opened_again() -> None:
    running = config(source_named("a"), source_named("b"))
    assert labels(change(running, running, 1)) == ([], ["b"], [])


def test_each_rank_of_a_source_is_compared() -> None:
    two = source_named("a", data_parallel_size=2)
    assert labels(change(config(source_named("a")), config(two))) == (["a/1"], ["a/0"], [])


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
def test_routers_must_reconnect_if_the_keys_of_kvbus_change(
    before: Curve | None, now: Curve | None, must: bool
) -> None:
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
def test_only_list_recognizes_changes_of_the_allow_list_only(
    before: Curve | None, now: Curve | None, only: bool
) -> None:
    assert only_list(before, now) is only


def found(name: str, port: int, replay: int | None = None, where: str = "dns") -> FoundSource:
    rank = FoundRank(0, f"tcp://a:{port}", None if replay is None else f"tcp://a:{replay}")
    return FoundSource.model_construct(**{**dict(SourceConfig()), "name": name, "ranks": (rank,), "where": where})


def with_source(source: FoundSource) -> Config:
    return config(source_named("a")).model_copy(update={"sources": (source,)})


def test_a_discovered_engine_at_another_address_has_moved() -> None:
    change = change_to(with_source(found("a", 1, 2)), with_source(found("a", 3, 4)), lambda _slot: True)
    assert labels(change) == ([], [], [])
    assert [stream.endpoint for stream in change.moved] == ["tcp://a:3"]


def test_another_origin_of_a_discovered_engine_is_no_change() -> None:
    change = change_to(with_source(found("a", 1)), with_source(found("a", 1, where="file")), lambda _slot: True)
    assert (labels(change), change.moved) == (([], [], []), ())


@pytest.mark.parametrize("other", [found("b", 3, 4), found("a", 1)])
def test_a_discovered_engine_with_another_name_or_replay_is_another_source(other: FoundSource) -> None:
    change = change_to(with_source(found("a", 1, 2)), with_source(other), lambda _slot: True)
    assert (labels(change), change.moved) == (([], [other.name], []), ())
