"""What a router says it holds, in whichever form it says so, and how far that is from what the engine has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

MASK: Final = 2**64 - 1
DEVICES: Final = {"GPU", "DEVICE"}

_DECIMAL: Final = re.compile(r"-?\d+")
_HEXADECIMAL: Final = re.compile(r"(?:0[xX])?([0-9a-fA-F]+)")


class Held(NamedTuple):
    """One live block. What a router does not tell is None."""

    hash: int
    medium: str | None = None
    group: int | None = None
    rank: int | None = None


class View(NamedTuple):
    """What a router holds.

    Attributes:
        held: the blocks.
        tells: the names of the fields of `Held` that the router tells.
        incomplete: it says itself that blocks may be missing or dead.
        by_prefix: it finds a block only where it holds all blocks before it.
    """

    held: frozenset[Held]
    tells: frozenset[str] = frozenset()
    incomplete: bool = False
    by_prefix: bool = False


class Source(NamedTuple):
    """What a request has to contain to hit a block."""

    parent: int | None
    tokens: list[int]


Known = dict[int, Source]
"""Every block that the engine has stored in a case, by its hash as 64 unsigned bits, parents before children."""


class Score(NamedTuple):
    """A router's view against the engine's cache, in blocks."""

    missing: int
    dead: int


class ViewError(ValueError):
    """What a router said is no view."""


def canonical(value: object) -> int:
    """Return a hash as 64 unsigned bits. Of bytes these are the last eight, as vLLM itself folds them.

    Raises:
        ViewError: it is no hash.
    """
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    if isinstance(value, int) and not isinstance(value, bool):
        return value & MASK
    text = str(value).strip()
    if _DECIMAL.fullmatch(text) and -(2**63) <= int(text) < 2**64:
        return int(text) & MASK
    if digits := _HEXADECIMAL.fullmatch(text):
        return int(digits[1][-16:], 16)
    raise ViewError(f"{text[:60]!r} is no hash")


def parse(text: str) -> View:
    """Return the view that a command prints or a URL answers.

    It is JSON (a list of blocks, or an object with the list as ``held``, and ``incomplete`` and ``by_prefix`` where
    they are true), or a block a line. A block is a hash, or an object with a ``hash`` and, where the router tells them,
    ``medium``, ``group`` and ``rank``.

    Raises:
        ViewError: it is something else.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = [_line(line) for line in text.splitlines() if line.strip()]
    if isinstance(found, dict) and "hash" not in found:
        return view_of(found)
    return view_of({"held": found if isinstance(found, list) else [found]})


def view_of(said: Mapping[str, Any]) -> View:
    """Return the view in an object with ``held``.

    Raises:
        ViewError: there is none in it.
    """
    blocks = said.get("held")
    if not isinstance(blocks, list):
        raise ViewError(f"there is no list of blocks in {json.dumps(said)[:100]}")
    held, tells = set(), set[str]()
    for block in blocks:
        entry = block if isinstance(block, dict) else {"hash": block}
        if "hash" not in entry:
            raise ViewError(f"a block without a hash: {json.dumps(entry)[:100]}")
        tells |= entry.keys() & {"medium", "group", "rank"}
        medium = entry.get("medium")
        name = None if medium is None else str(medium).upper()
        held.add(Held(canonical(entry["hash"]), "GPU" if name in DEVICES else name,
                      entry.get("group"), entry.get("rank")))  # fmt: skip
    return View(frozenset(held), frozenset(tells), bool(said.get("incomplete")), bool(said.get("by_prefix")))


def score(cache: Iterable[Held], view: View, known: Known) -> Score:
    """Compare a router's view with the engine's cache, by what the router tells."""
    expected = set(cache)
    if view.by_prefix:
        hashes = {block.hash for block in expected}
        expected = {block for block in expected if _path(block.hash, known) <= hashes}

    def shown(blocks: Iterable[Held]) -> set[tuple[object, ...]]:
        return {(block.hash, *(getattr(block, name) for name in sorted(view.tells))) for block in blocks}

    wanted, found = shown(expected), shown(view.held)
    return Score(len(wanted - found), len(found - wanted))


def _path(block: int, known: Known) -> set[int]:
    """Return a block and all before it."""
    path: set[int] = set()
    at: int | None = block
    while at is not None and at not in path:
        path.add(at)
        at = known[at].parent if at in known else None
    return path


def _line(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return line.strip()
