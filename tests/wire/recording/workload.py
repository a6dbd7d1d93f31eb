"""Requests for recorded engines, made from a seed.

They have shared prefixes: system prompts, continued conversations, repeated prompts, salts and sessions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class Ask:
    """A request of the workload, before it is sent to an engine."""

    tokens: list[int]
    answer: int
    session: str
    salt: str | None
    conversation: list[int] = field(repr=False)
    """The conversation from which the prompt was made. The answer is appended to it."""


class Workload:
    """A source of prompts of a few hundred tokens. The same seed gives the same prompts."""

    def __init__(self, seed: int, *, vocabulary: int = 900, longest: int = 700, salts: bool = False) -> None:
        self.random = random.Random(seed)
        self.vocabulary = vocabulary
        self.longest = longest
        self.salts = salts
        self.systems = [self._some(length) for length in (40, 96, 130)]
        self.conversations: list[list[int]] = []
        self.asked = 0

    def next(self) -> Ask:
        chance = self.random
        self.asked += 1
        if not self.conversations or chance.random() < 0.45:
            self.conversations.append([*chance.choice(self.systems), *self._some(chance.randint(4, 90))])
            self.conversations = self.conversations[-24:]
        history = chance.choice(self.conversations)
        if chance.random() < 0.7:
            history += self._some(chance.randint(1, 60))
        if len(history) > self.longest:
            del history[chance.randint(120, 300) :]
        return Ask(
            tokens=list(history),
            answer=chance.choice((1, 2, 7, 20, 45)),
            session=f"session-{self.conversations.index(history)}",
            salt=chance.choice((None, "tenant-a", "tenant-b")) if self.salts else None,
            conversation=history,
        )

    def _some(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(count)]


def continuation(tokens: list[int], vocabulary: int = 900) -> int:
    """Return the token that the fake model generates next. Equal prompts get equal answers."""
    return (sum(tokens[-7:]) * 31 + len(tokens)) % vocabulary


class Kept:
    """The batches of a recorded engine, encoded and numbered as the engine's publisher thread does it.

    ``clock`` makes their times reproducible.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.batches: list[tuple[float, int, bytes]] = []
        self._clock = clock
        self._pack = msgspec.msgpack.Encoder().encode

    def publish(self, events: Any) -> None:
        events.ts = self._clock()
        self.batches.append((events.ts, len(self.batches), self._pack(events)))
