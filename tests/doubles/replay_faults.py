"""Faults of an engine's replay, for `EnginePublisher.replay_fault`.

Each function gets the messages of a correct answer, of which the last is END. It returns the messages to send instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Messages = list[list[bytes]]


def silent(_: Messages) -> Messages:
    """Send no message, as an engine that does not answer a replay request."""
    return []


def empty(messages: Messages) -> Messages:
    """Send only END, without a batch."""
    return messages[-1:]


def no_end(messages: Messages) -> Messages:
    """Send every batch but no END, like an engine whose ROUTER dropped END at its high-water mark."""
    return messages[:-1]


def endless(messages: Messages) -> Iterable[list[bytes]]:
    """Send the batches again and again for ever, without END."""
    return itertools.cycle(messages[:-1])


def duplicate(messages: Messages) -> Messages:
    """Send every batch twice, then END."""
    return [*(message for message in messages[:-1] for _ in range(2)), messages[-1]]


def interleave(messages: Messages) -> Messages:
    """Send two answers whose messages alternate, each with its own END, as if kvbus had sent two requests."""
    return [message for message in messages for _ in range(2)]
