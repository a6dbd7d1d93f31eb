"""Tests for the rights that may follow a router's key in an allow-list, such as ``sources=``.

They cover every form of a right, and check that no other text gives a right.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.transport.curve import KeyFileError, generate, read_allowed
from kvbus.transport.grants import EVERYTHING, RIGHTS, Client, Grant, GrantError, parse


@pytest.mark.parametrize(
    ("text", "client"),
    [
        ("", Client()),
        ("  # sources=a", Client()),
        ("team-a", Client("team-a")),
        (" name=team-a ", Client("team-a")),
        ('"team a"  # the first one', Client("team a")),
        ("sources=engine-1", Client("", Grant(sources=("engine-1",)))),
        (
            'team-a sources=engine-1,"engine 2/*" loras=sql-*,7 salts="a,b",c',
            Client(
                "team-a", Grant(sources=("engine-1", "engine 2/*"), loras=("sql-*", "7"), salts=frozenset({"a,b", "c"}))
            ),
        ),
        ("models=Qwen/* topics=kv@* b", Client("b", Grant(models=("Qwen/*",), topics=("kv@*",)))),
        (r'salts="a\"b\\#=" # c', Client("", Grant(salts=frozenset({'a"b\\#='})))),
        ("salts=*", Client("", Grant(salts=frozenset({"*"})))),
    ],
)
def test_a_valid_line_of_rights_is_parsed(text: str, client: Client) -> None:
    assert parse(text) == client


@pytest.mark.parametrize(
    "text",
    [
        "first router",
        "name=a name=b",
        "a name=b",
        "name=a,b",
        "sources",
        "sources engine-1",
        "sources = engine-1",
        "sources= engine-1",
        "sources =engine-1",
        "sources: engine-1",
        "sources:engine-1",
        "Sources=engine-1",
        "souces=engine-1",
        "sources=a sources=b",
        "sources=",
        'sources=""',
        "sources=a,",
        "sources=,a",
        "sources=a,,b",
        "sources=a, b",
        "sources=a ,b",
        'sources="a',
        'sources="a"b',
        "sources=a=b",
        "sources=a;loras=b",
        "salts=abc#def",
        r"salts=a\b",
        r'salts="a\nb"',
        'salts="a\x07b"',
        "salts=\ufffd",
        "=a",
        ",",
        '"',
        "a\x00b",
    ],
)
def test_an_invalid_line_of_rights_is_refused_and_not_quoted(text: str) -> None:
    with pytest.raises(GrantError) as caught:
        parse(text)
    for word in re.findall(r"[\w-]{3,}", text):
        assert word in {*RIGHTS, "engine-1", "name"} or word not in str(caught.value)


def quoted(item: str) -> str:
    escaped = item.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


ITEMS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=8).filter(
    str.isprintable
)
GIVEN = st.dictionaries(st.sampled_from(RIGHTS), st.lists(ITEMS, min_size=1, max_size=3), max_size=5)


@given(GIVEN, st.permutations(RIGHTS))
def test_quoted_rights_are_read_back_unchanged(given_rights: dict[str, list[str]], order: list[str]) -> None:
    words = [f"{right}={','.join(map(quoted, given_rights[right]))}" for right in order if right in given_rights]
    grant = parse(" ".join(words)).grant
    for right in RIGHTS:
        expected = given_rights.get(right)
        found = getattr(grant, right)
        assert (set(found) if found is not None else None) == (set(expected) if expected is not None else None)


LINES = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*'ab ="\\,#*\t', *(f"{right}=" for right in RIGHTS)]), max_size=30).map("".join),
)


@given(LINES)
def test_a_random_line_grants_only_the_rights_that_it_contains(text: str) -> None:
    """If a random line is accepted, each of its rights is a word with ``=`` outside quotes.

    The items of a right have the same spelling as in the line.
    """
    try:
        client = parse(text)
    except GrantError:
        return
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '"', text).partition("#")[0]
    limits = [word for word in bare.split() if "=" in word and not word.startswith("name=")]
    assert len(limits) == sum(getattr(client.grant, right) is not None for right in RIGHTS)
    for right in RIGHTS:
        for item in getattr(client.grant, right) or ():
            assert item in text or quoted(item) in text
    assert (client.grant == EVERYTHING) == (not limits)


def test_a_key_file_in_a_directory_gives_its_name_to_the_key(tmp_path: Path) -> None:
    keys = [generate()[0].decode() for _ in range(3)]
    (tmp_path / "team-a.key").write_text(f'public-key = "{keys[0]}"\n')
    (tmp_path / "pool").write_text(f"{keys[1]} b\n{keys[2]} loras=x\n")
    named = [(each.name, each.grant.loras) for each in read_allowed(tmp_path).values()]
    assert sorted(named) == [("b", None), ("pool", ("x",)), ("team-a", None)]


def test_a_key_listed_twice_with_different_rights_is_refused(tmp_path: Path) -> None:
    (key, other), path = (generate()[0].decode() for _ in range(2)), tmp_path / "list"
    path.write_text(f"{key} a salts=x\n{other} b\n{key} a salts=x\n")
    assert len(read_allowed(path)) == 2
    for line in (f"{key} a", f"{key} b salts=x", f"{key} a salts=x,y"):
        path.write_text(f"{key} a salts=x\n\n{line}\n")
        with pytest.raises(KeyFileError, match="line 3: this key is on the list already") as caught:
            read_allowed(path)
        assert key not in str(caught.value)


def test_the_error_names_an_unreadable_line_and_does_not_quote_it(tmp_path: Path) -> None:
    key, path = generate()[0].decode(), tmp_path / "list"
    path.write_text(f"# routers\n{key} a salts=hunter2 hunter2\n")
    with pytest.raises(KeyFileError, match="line 2: ") as caught:
        read_allowed(path)
    assert "hunter2" not in str(caught.value)
    assert key not in str(caught.value)


def test_salts_are_never_shown() -> None:
    client = parse("team-a salts=hunter2,hunter3 loras=x")
    assert "hunter" not in repr(client)
    assert client.grant.sentence == "loras x; 2 salts"
    assert parse("a salts=hunter2").grant.sentence == "one salt"
    assert parse("a").grant.sentence == "everything"


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("sources=engine", True),
        ("sources=engine/1", True),
        ("sources=engine/*", True),
        ("sources=engine/2,other", False),
        ("sources=e*", True),
        ("sources=Engine", False),
        ("models=Qwen*", True),
        ("models=Llama*", False),
        ("topics=kv@pod@*", True),
        ("topics=kv@other@*", False),
        ("sources=engine topics=other", False),
    ],
)
def test_a_key_may_read_a_source_that_matches_all_its_rights(text: str, reads: bool) -> None:
    grant = parse(text).grant
    assert grant.reads_source("engine", "engine/1", "Qwen3", "kv@pod@Qwen3") == reads


def test_an_unknown_model_or_topic_of_a_source_matches_no_right() -> None:
    assert not parse("models=*").grant.reads_source("e", "e", None, "t")
    assert not parse("topics=*").grant.reads_source("e", "e", "m", None)
    assert EVERYTHING.reads_source("e", "e", None, None)
