"""Captures (recorded streams of engines, with the blocks that they had at the end), and a comparison of a router with
them.

>>> router = PlainSetRouter()
>>> for message in published:
...     router.apply(message.seq, message.payload)
>>> assert matches_truth("vllm033_map_int", router) is None
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from kvbus.core.types import PREFIX_KINDS, medium_key
from kvbus.tools.capture.format import Message, read_capture
from tests.doubles.router import PlainSetRouter

DATA: Final = Path(__file__).parent / "data"
CAPTURES: Final = sorted(path.name.removesuffix(".jsonl") for path in DATA.glob("*.jsonl"))
BY_PREFIX: Final = frozenset({"syn_sglang_variable"})
"""Captures whose list of true blocks names a block by the SHA-256 of the complete prompt prefix that it ends.

In these captures the engine's hashes identify radix nodes, not blocks.
"""

Key = tuple[int | None, str, int | bytes | str]
"""Group, medium key and identity of a block.

The identity is its hash, or the hex SHA-256 of its prefix (see BY_PREFIX).
"""


@functools.cache
def _load(name: str) -> tuple[Message, ...]:
    return tuple(read_capture(DATA / f"{name}.jsonl"))


def load(name: str) -> list[Message]:
    """Return all messages of a capture in the order of publication.

    After a restart of the engine, seqs begin at 0 again.
    """
    return list(_load(name))


def lives(name: str) -> list[list[Message]]:
    """Return the messages of a capture, as one list for each epoch of its engine."""
    found: list[list[Message]] = []
    for message in _load(name):
        if not found or message.seq <= found[-1][-1].seq:
            found.append([])
        found[-1].append(message)
    return found


def truth(name: str, *, every_group: bool = False) -> set[Key]:
    """Return the blocks that the engine's cache held at the end of a capture.

    By default, leave out the groups whose blocks a router cannot match with a prompt's prefix, such as sliding windows.
    """
    blocks = json.loads((DATA / f"{name}.truth.json").read_text())["blocks"]
    return {
        (block.get("group_idx"), _medium(block.get("medium")), _identity(block))
        for block in blocks
        if every_group or block.get("kind") is None or block["kind"] in PREFIX_KINDS
    }


def digest(keys: Iterable[Key]) -> str:
    """Return a short digest of a set of blocks, to compare cache contents at one point of a capture."""
    return hashlib.sha256(repr(sorted(keys, key=repr)).encode()).hexdigest()[:16]


def points(name: str) -> dict[int, str]:
    """Return digests of the engine's cache at several moments of a capture.

    The key is the number of messages that the engine had published before.
    """
    found = json.loads((DATA / f"{name}.truth.json").read_text()).get("points", ())
    return {int(messages): str(held) for messages, held in found}


def _medium(name: str | None) -> str:
    key = medium_key(name)
    assert key is not None, name
    return key


def _identity(block: dict[str, Any]) -> int | bytes | str:
    if "prefix" in block:
        return str(block["prefix"])
    value = block["hash"]
    return bytes.fromhex(value) if isinstance(value, str) else int(value)


def matches_truth(name: str, router: PlainSetRouter) -> str | None:
    """Return None if the router holds exactly the engine's blocks at the end. Otherwise describe the difference."""
    expected = truth(name)
    got: set[Key]
    if name in BY_PREFIX:
        got = {(None, "GPU", prefix) for prefix in router.prefixes()}
        if len(got) != len(router.blocks):
            return f"{name}: {len(router.blocks)} blocks but {len(got)} prefixes"
    else:
        got = set(router.blocks)
    missing, dead = expected - got, got - expected
    if not missing and not dead:
        return None
    return (
        f"{name}: {len(missing)} of {len(expected)} blocks missing, {len(dead)} dead"
        f" (for example missing {_some(missing)}, dead {_some(dead)})"
    )


def _some(keys: set[Key]) -> list[Key]:
    return sorted(keys, key=repr)[:2]
