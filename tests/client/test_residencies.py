"""Tests that views and prefix indexes keep a block until its last residency (locality and owner) on a medium is gone."""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.client import BlockView
from kvbus.client.prefix_index import PrefixIndex
from kvbus.core.wire.codec import decode_batch
from tests.doubles.payloads import payload, removed, store, tokens_of

KVCR, REMOTE, LOCAL = {"ownership": "kvcr"}, {"locality": "REMOTE"}, {"locality": "LOCAL"}
HISTORIES: list[tuple[list[dict[str, Any]], bool]] = [
    ([store([1], **KVCR), store([1]), removed([1])], True),
    ([store([1], **KVCR), store([1]), removed([1], **KVCR)], True),
    ([store([1], **KVCR), store([1]), removed([1], **KVCR), removed([1])], False),
    ([store([1], **LOCAL), store([1], **REMOTE), removed([1], **LOCAL)], True),
    ([store([1], **REMOTE), removed([1], **LOCAL)], True),
    ([store([1], **REMOTE), removed([1], **REMOTE)], False),
    ([store([1], **LOCAL), removed([1])], False),
    ([store([1]), removed([1], **LOCAL)], False),
    ([store([1]), store([1], **LOCAL), removed([1], **LOCAL)], True),
]


@pytest.mark.parametrize(("events", "live"), HISTORIES)
@pytest.mark.parametrize("copies", [False, True])
def test_a_view_keeps_a_block_until_its_last_residency_is_removed(events: Any, live: bool, copies: bool) -> None:
    view = BlockView(copies=copies)
    view.apply_batch(decode_batch(payload(*events)))  # type: ignore[arg-type]
    assert (1 in view) == live


def test_a_view_lists_the_residencies_of_a_block() -> None:
    view = BlockView(copies=True)
    view.apply_batch(decode_batch(payload(store([1], **KVCR), store([1], **KVCR), store([1]))))  # type: ignore[arg-type]
    block = view.get(1, rank=0)
    assert block is not None
    assert (block.residencies, block.copies) == ({(None, "kvcr"): 2, (None, None): 1}, 3)
    view.apply_batch(decode_batch(payload(removed([1], **KVCR), removed([1]))))  # type: ignore[arg-type]
    assert (block.residencies, block.copies) == ({(None, "kvcr"): 1}, 1)


@pytest.mark.parametrize(("events", "live"), HISTORIES)
def test_a_prefix_index_finds_a_block_until_its_last_residency_is_removed(events: Any, live: bool) -> None:
    index = PrefixIndex[str]()
    for event in decode_batch(payload(*events)).events:  # type: ignore[union-attr]
        index.apply("w", event)
    assert index.longest_prefix(tokens_of(1)) == ({"w": 1} if live else {})
    assert index.on_media("w") == ({"GPU": 1} if live else {})
