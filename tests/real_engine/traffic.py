"""Send requests of several kinds to a real engine. Each kind changes the engine's cache in a different way."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS: Final = ("plain", "choices", "twins", "stream", "abort", "long", "salt")
AT_ONCE: Final = 10
LOWEST, HIGHEST = 3, 258
"""The range of the tiny models' tokens that are not special."""


def tokens(source: random.Random, count: int) -> list[int]:
    return [source.randint(LOWEST, HIGHEST) for _ in range(count)]


class Traffic:
    """Completions for prompts that share eight prefixes.

    Args:
        api: base URL of the engine.
        seed: seed of all random choices.
    """

    def __init__(self, api: str, seed: int) -> None:
        self._url = f"{api}/v1/completions"
        self._random = random.Random(seed)
        self._prefixes = [tokens(self._random, self._random.choice((40, 96, 200, 333, 512))) for _ in range(8)]

    def _request(self, kind: str, model: str) -> dict[str, Any]:
        choose = self._random.choice
        prompt = choose(self._prefixes) + tokens(self._random, choose((0, 1, 7, 31, 64, 150)))
        common = {"model": model, "prompt": prompt, "temperature": 1.0, "ignore_eos": True}
        own: dict[str, dict[str, Any]] = {
            "choices": {"n": 3},
            "twins": {"prompt": [prompt] * 3, "temperature": 0, "max_tokens": 80},
            "stream": {"stream": True},
            "abort": {"stream": True, "max_tokens": 300},
            "long": {"max_tokens": 500},
            "salt": {"cache_salt": choose(("red", "blue"))},
            "unique": {"prompt": tokens(self._random, 512)},
        }
        return common | {"max_tokens": choose((1, 4, 16, 40))} | own.get(kind, {})

    async def send(self, count: int, kinds: Sequence[str] = KINDS, models: Sequence[str] = ("tiny",)) -> int:
        """Send requests, ten at the same time. Return how many a killed engine did not answer."""
        gate = asyncio.Semaphore(AT_ONCE)
        timeout = aiohttp.ClientTimeout(total=300)

        async def one(session: aiohttp.ClientSession) -> bool:
            async with gate:
                kind = self._random.choice(kinds)
                asked = self._request(kind, self._random.choice(models))
                parts = self._random.randrange(2, 40) if kind == "abort" else None
                try:
                    async with session.post(self._url, json=asked) as answer:
                        if answer.status != 200:
                            raise AssertionError(f"{kind}: {answer.status} {await answer.text()}")
                        async for _ in answer.content:
                            if parts is not None and (parts := parts - 1) == 0:
                                break  # close the connection here: the engine aborts the request
                except aiohttp.ClientError:
                    return False
                return True

        async with aiohttp.ClientSession(timeout=timeout) as session:
            answered = await asyncio.gather(*(one(session) for _ in range(count)))
        return answered.count(False)
