"""Faults of an engine's replay, for `EnginePublisher.replay_fault`: what is sent in place of an answer, whose END is last."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Messages = list[list[bytes]]


def silent(_: Messages) -> Messages:
    """No answer at all."""
    return []


def empty(messages: Messages) -> Messages:
    """END at once, without batches."""
    return messages[-1:]


def no_end(messages: Messages) -> Messages:
    """Every batch and no END marker, as an engine whose ROUTER dropped END at its high-water mark."""
    return messages[:-1]


def endless(messages: Messages) -> Iterable[list[bytes]]:
    """The same batches without end, and no END marker."""
    return itertools.cycle(messages[:-1])


def duplicate(messages: Messages) -> Messages:
    """Every batch twice."""
    return [*(message for message in messages[:-1] for _ in range(2)), messages[-1]]


def interleave(messages: Messages) -> Messages:
    """Two interleaved answers, each with its END, as if two requests were outstanding."""
    return [message for message in messages for _ in range(2)]
