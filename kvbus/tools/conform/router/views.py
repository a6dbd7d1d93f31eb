"""A router's view of the live blocks: a parser for it, and a comparison with the simulated engine's cache."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

MASK: Final = 2**64 - 1
DEVICES: Final = {"GPU", "DEVICE"}

_DECIMAL: Final = re.compile(r"-?\d+")
_HEXADECIMAL: Final = re.compile(r"(?:0[xX])?([0-9a-fA-F]+)")


class HeldBlock(NamedTuple):
    """One live block in a router's view. A field that the router does not report is None."""

    hash: int
    medium: str | None = None
    group: int | None = None
    rank: int | None = None


class View(NamedTuple):
    """The blocks that a router holds.

    Attributes:
        held: the blocks.
        tells: names of the fields of `HeldBlock` that the router reports besides the hash.
        incomplete: whether the router reports that blocks may be missing or dead.
        by_prefix: whether the router finds a block only if it holds all previous blocks of the prefix.
    """

    held: frozenset[HeldBlock]
    tells: frozenset[str] = frozenset()
    incomplete: bool = False
    by_prefix: bool = False


class Source(NamedTuple):
    """The content of a block: the parent's hash and the tokens. A router that finds blocks by their tokens needs it."""

    parent: int | None
    tokens: list[int]


Known = dict[int, Source]
"""The contents of all blocks that the engine has stored in a case, by hash (64 unsigned bits), parents first."""


class Score(NamedTuple):
    """The numbers of missing and dead blocks in a router's view, compared with the engine's cache."""

    missing: int
    dead: int


class ViewError(ValueError):
    """The answer of a router to a question about its blocks cannot be understood."""


def canonical(value: object) -> int:
    """Return a hash as an integer of 64 unsigned bits. For a byte hash, this is its last eight bytes, as at vLLM.

    Raises:
        ViewError: the value is not a hash.
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
    raise ViewError(f"{text[:60]!r} is not a hash")


def parse(text: str) -> View:
    """Parse the text in which a router lists its blocks at a URL, and return the router's view.

    The text is JSON, or has a block on each line. JSON is a list of blocks, or an object with the list as ``held`` and
    optionally ``incomplete`` and ``by_prefix``. A block is a hash, or an object with ``hash`` and, if the router
    reports them, ``medium``, ``group`` and ``rank``.

    Raises:
        ViewError: the text has another form.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = [_line(line) for line in text.splitlines() if line.strip()]
    if isinstance(found, dict) and "hash" not in found:
        return view_of(found)
    return view_of({"held": found if isinstance(found, list) else [found]})


def view_of(answer: Mapping[str, Any]) -> View:
    """Convert a router's answer to a view. The answer is an object that has a list of blocks as ``held``.

    Raises:
        ViewError: the object has no list of blocks, or a block has no valid hash.
    """
    blocks = answer.get("held")
    if not isinstance(blocks, list):
        raise ViewError(f"there is no list of blocks in {json.dumps(answer)[:100]}")
    held, tells = set(), set[str]()
    for block in blocks:
        entry = block if isinstance(block, dict) else {"hash": block}
        if "hash" not in entry:
            raise ViewError(f"a block has no hash: {json.dumps(entry)[:100]}")
        tells |= entry.keys() & {"medium", "group", "rank"}
        medium = entry.get("medium")
        name = None if medium is None else str(medium).upper()
        held.add(HeldBlock(canonical(entry["hash"]), "GPU" if name in DEVICES else name,
                      entry.get("group"), entry.get("rank")))  # fmt: skip
    return View(frozenset(held), frozenset(tells), bool(answer.get("incomplete")), bool(answer.get("by_prefix")))


def score(cache: Iterable[HeldBlock], view: View, known: Known) -> Score:
    """Count the missing and dead blocks in a router's view, compared with the simulated engine's cache.

    If the router does not report a field of its blocks, such as the medium, the comparison ignores this field.
    """
    expected = set(cache)
    if view.by_prefix:
        hashes = {block.hash for block in expected}
        expected = {block for block in expected if _path(block.hash, known) <= hashes}

    def shown(blocks: Iterable[HeldBlock]) -> set[tuple[object, ...]]:
        return {(block.hash, *(getattr(block, name) for name in sorted(view.tells))) for block in blocks}

    wanted, found = shown(expected), shown(view.held)
    return Score(len(wanted - found), len(found - wanted))


def _path(block: int, known: Known) -> set[int]:
    """Return the hash of a block and the hashes of all blocks before it in its prefix."""
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
