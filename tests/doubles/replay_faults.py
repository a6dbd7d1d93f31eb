"""Faults of an engine's replay for `EnginePublisher.replay_fault`. Each gets an answer, END last, and returns its
substitute."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Messages = list[list[bytes]]


def silent(_: Messages) -> Messages:
    """Send no answer."""
    return []


def empty(messages: Messages) -> Messages:
    """Send END without batches."""
    return messages[-1:]


def no_end(messages: Messages) -> Messages:
    """Send every batch but no END marker, like an engine whose ROUTER dropped END at its high-water mark."""
    return messages[:-1]


def endless(messages: Messages) -> Iterable[list[bytes]]:
    """Send the same batches for ever, and no END marker."""
    return itertools.cycle(messages[:-1])


def duplicate(messages: Messages) -> Messages:
    """Send every batch twice."""
    return [*(message for message in messages[:-1] for _ in range(2)), messages[-1]]


def interleave(messages: Messages) -> Messages:
    """Send two interleaved answers, each with its END, as if two requests were outstanding."""
    return [message for message in messages for _ in range(2)]
