"""Tests for views, the separate streams of routers with limited rights.

They test which views exist, which client keys read which view, and what a change of the allow-list causes.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.common.errors import ConfigError
from kvbus.config import Config, load
from kvbus.daemon.keys import Keys, output_domain, who_reads_what
from kvbus.daemon.placement import Worker
from kvbus.daemon.views import AccessScope, AccessScopes
from kvbus.transport.curve import Curve
from kvbus.transport.grants import EVERYTHING, Client, Grant, parse

A, B, AB = (Grant(salts=frozenset(salts)) for salts in ("a", "b", "ab"))


def config(**settings: Any) -> Config:
    sources = [{"name": "engine", "endpoint": "tcp://127.0.0.1:5557", "data_parallel_size": 2}]
    outputs = [{"name": "routers", "endpoint": "tcp://*:6000"}, {"name": "more", "endpoint": "tcp://*:6100"}]
    outputs[0] |= settings.pop("output", {})
    return load(None, env={}, overrides={"sources": sources, "outputs": outputs, "model": "Qwen3", **settings})


def keys(**grants: Grant | str) -> Keys:
    """Return kvbus's CURVE keys, with the allow-list of the first output.

    ``grants`` has the rights of each client key: as an object, or as the text that follows a key in an allow-list.
    """
    listed = {}
    for name, grant in grants.items():
        listed[name.encode()] = parse(grant) if isinstance(grant, str) else Client(name, grant)
    return {output_domain("routers"): Curve(b"p", b"s", clients=listed)}


def by_key(views: AccessScopes, found: Keys, output: int = 0) -> dict[str, int]:
    curve = found[output_domain("routers")]
    return {key.decode(): number for key, number in views.by_key(output, curve.clients).items()}


def test_routers_with_the_same_limited_rights_share_a_view() -> None:
    found = keys(r1=A, r2=B, r3=A, r4=EVERYTHING)
    views = AccessScopes(config(), found)
    assert views.all == [AccessScope(0), AccessScope(1), AccessScope(0, A), AccessScope(0, B)]
    assert by_key(views, found) == {"r1": 2, "r2": 3, "r3": 2}
    assert AccessScopes(config(), {}).all == [AccessScope(0), AccessScope(1)]


def test_an_added_key_joins_a_view_and_the_last_removed_key_closes_it() -> None:
    views = AccessScopes(config(), keys(r1=A))
    found = keys(r1=A, r2=A, r3=B)
    assert views.change(config(), found) == [3]
    assert by_key(views, found) == {"r1": 2, "r2": 2, "r3": 3}
    found = keys(r2=A)
    assert views.change(config(), found) == [3]
    assert by_key(views, found) == {"r2": 2}
    assert views.all[3].closed
    assert views.change(config(), found) == []


def test_a_router_whose_rights_change_gets_a_new_view() -> None:
    """A router whose rights change gets a new view, even if a view with its new rights exists.

    It has received seqs of its old view, and the seqs of the existing view may be lower.
    """
    views = AccessScopes(config(), keys(r1=A, r2=B))
    found = keys(r1=B, r2=B)
    assert views.change(config(), found) == [2]
    assert by_key(views, found) == {"r1": 2, "r2": 3}
    assert (views.all[2].grant, views.all[3].grant) == (B, B)
    assert views.all[2] != views.all[3]
    assert views.all[2].name(config()) != views.all[3].name(config())


def test_a_router_that_gets_all_rights_has_a_new_view() -> None:
    views = AccessScopes(config(), keys(r1=A, r2=EVERYTHING))
    found = keys(r1=EVERYTHING, r2=EVERYTHING)
    assert views.change(config(), found) == [2]
    assert by_key(views, found) == {"r1": 2}
    assert views.all[2].grant == EVERYTHING


def test_a_key_that_returns_with_other_rights_gets_a_new_view() -> None:
    views = AccessScopes(config(), keys(r1=A, r2=B))
    views.change(config(), keys(r2=B))
    found = keys(r1=B, r2=B)
    views.change(config(), found)
    assert by_key(views, found)["r1"] != by_key(views, found)["r2"]
    same = keys(r1=A, r2=B)
    again = AccessScopes(config(), same)
    again.change(config(), keys(r2=B))
    again.change(config(), same)
    assert again.all[by_key(again, same)["r1"]].since > 0, "its view was closed, and its numbering with it"


def test_a_change_to_more_views_than_max_views_is_refused() -> None:
    limited = config(limits={"max_views": 2})
    views = AccessScopes(limited, keys(r1=A, r2=B))
    before = list(views.all)
    with pytest.raises(ConfigError, match=r"3 different sets of rights, but limits\.max_views allows 2"):
        views.change(limited, keys(r1=A, r2=B, r3=AB))
    assert views.all == before
    assert views.change(limited, keys(r1=A, r3=AB)) == [3]


def test_the_identity_of_a_state_depends_on_the_views_and_their_keys() -> None:
    def identity(found: Keys) -> list[str]:
        return AccessScopes(config(), found).identity(config(), found)

    assert identity({}) == identity(keys(r1=EVERYTHING)) == []
    assert identity(keys(r1=A)) == identity(keys(r1=A, r2=EVERYTHING))
    several = [keys(r1=A), keys(r2=A), keys(r1=A, r2=A), keys(r1=B), keys(r1=A, r2=B), keys(r1=B, r2=A)]
    assert len({tuple(identity(each)) for each in several}) == len(several)
    assert "salt" not in str([identity(each) for each in several])


@pytest.mark.parametrize(
    ("text", "output", "sees"),
    [
        ("sources=engine", {}, [True, True]),
        ("sources=engine/1", {}, [False, True]),
        ("sources=other", {}, [False, False]),
        ("models=Qwen*", {}, [True, True]),
        ("models=Llama*", {}, [False, False]),
        ("topics=kv@*/1", {"topic": "kv@{source}/{rank}"}, [False, True]),
        ("topics=*", {}, [False, False]),
        ("loras=x salts=y", {}, [True, True]),
    ],
)
def test_a_view_sees_the_sources_that_its_rights_permit(text: str, output: dict[str, str], sees: list[bool]) -> None:
    made = config(output=output)
    found = keys(r1=text)
    views = AccessScopes(made, found)
    assert [views.all[2].sees(made, Worker("engine", rank)) for rank in (0, 1)] == sees
    assert views.hidden(made, 0) == {slot: frozenset() if seen else frozenset({2}) for slot, seen in enumerate(sees)}
    assert views.hidden(made, 1) == {0: frozenset(), 1: frozenset()}


def test_a_closed_view_sees_no_source() -> None:
    assert not AccessScope(0, A, closed=True).sees(config(), Worker("engine", 0))


def test_the_text_about_access_rights_contains_no_salts() -> None:
    found = keys(r1="team-a salts=hunter2 sources=engine/1", r2="")
    assert who_reads_what(config(), found) == [
        "output routers: a key without a name reads everything",
        "output routers: team-a reads sources engine/1; one salt",
    ]
