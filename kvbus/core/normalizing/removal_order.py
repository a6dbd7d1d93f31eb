"""Removals leave leaf first: a router that keeps a tree (Dynamo) loses the descendants of a removed inner block."""

from __future__ import annotations

from collections.abc import Sequence

from kvbus.core.types import Hash

Gone = tuple[Hash, Hash | None]
"""A block that is gone, and its parent."""


def leaf_first(gone: Sequence[Gone]) -> list[Hash]:
    """The hashes of one run of removals, children before parents, otherwise in the order they came.

    Cycles (possible where hashes are not chained, SGLang before 0.5.8) are broken at the first member named.
    """
    order: list[Hash] = []
    chain = 0
    """Where the blocks begin of which each is the parent of the next one."""
    last: Hash | None = None
    seen: set[Hash] = set()
    for block, parent in gone:
        if parent is None or parent != last:
            if parent in seen:
                return _searched(gone)
            _turn(order, chain)
            chain = len(order)
        order.append(block)
        seen.add(block)
        last = block
    _turn(order, chain)
    return order


def _turn(order: list[Hash], chain: int) -> None:
    """Turn what begins there, the root, round."""
    if len(order) - chain > 1:
        turned = order[chain:]
        turned.reverse()
        order[chain:] = turned


def _searched(gone: Sequence[Gone]) -> list[Hash]:
    """The same, whatever the order they came in."""
    members = {block for block, _ in gone}
    children: dict[Hash, list[Hash]] = {}
    for block, parent in gone:
        if parent is not None and parent in members:
            children.setdefault(parent, []).append(block)
    done: set[Hash] = set()
    order: list[Hash] = []
    for root, _ in gone:
        stack: list[tuple[Hash, bool]] = [(root, False)]
        while stack:
            block, expanded = stack.pop()
            if expanded:
                order.append(block)
            elif block not in done:
                done.add(block)
                stack.append((block, True))
                stack.extend((child, False) for child in reversed(children.get(block, ())) if child not in done)
    return order
