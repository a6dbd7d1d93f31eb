"""An engine's OpenAI-style API, asked for what makes it store, evict, reset and sleep."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from kvbus.parts.discovery.contract import DiscoveryError
from kvbus.parts.discovery.engine_answers import of_sglang, of_vllm
from kvbus.tools.conform.engine.judge import EngineJudge
from kvbus.transport import engine_api

WAIT_S: Final = 10.0
"""Seconds for the events of a prompt."""
AT_ONCE_S: Final = 3.0
"""Seconds in which a cache that was emptied has to say so."""
_WORDS: Final = 600
"""Of a prompt: several blocks, at any usual block size."""
_TOGETHER: Final = 4


class ApiError(Exception):
    """The API refuses a request, or does not carry it out."""


class Reset(StrEnum):
    """The path of an engine's cache reset, which shows which engine it is."""

    VLLM = "/reset_prefix_cache"
    """There with ``VLLM_SERVER_DEV_MODE=1``. It resets the device's cache."""
    SGLANG = "/flush_cache"
    """It resets every tier."""


@dataclass(slots=True)
class Api:
    """An API, and the judge that sees what comes of it.

    Attributes:
        judge: what is seen goes there.
        base: the URL, without a path.
        model: the model to ask; empty for the first that the API names.
        prompts: how many different ones are sent.
        notes: what could not be done, for the report.
    """

    judge: EngineJudge
    base: str
    model: str
    prompts: int
    notes: list[str]

    async def provoke(self) -> None:
        """Go through all cases. What fails is a note, and the others are tried all the same."""
        async with engine_api.session() as client:
            await self._step("endpoints", self._endpoints(client))
            if not await self._step("prompts", self._prompts(client)):
                return
            await self._step("reset", self._reset(client))
            await self._step("sleep", self._sleep(client))

    async def _step(self, name: str, work: Any) -> bool:
        try:
            await work
        except (ApiError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = " ".join(str(error).split())[:160] or type(error).__name__
            self.notes.append(f"{name} through the API: {why}")
            return False
        return True

    async def _endpoints(self, client: aiohttp.ClientSession) -> None:
        host, said = urlsplit(self.base).hostname or "", ""
        for path, read in (("/kv_event_sources", of_vllm), ("/server_info", of_sglang)):
            async with client.get(self.base + path, allow_redirects=False) as answer:
                if answer.status != 200:
                    said += f"{path}: {answer.status} "
                    continue
                try:
                    if read(json.loads(await answer.text()), host)[0]:
                        self.judge.ledger.kept("1.3")
                        return
                except (DiscoveryError, ValueError) as error:
                    said += f"{path}: {error} "
        self.judge.ledger.broken("1.3", f"the API does not say where the events are ({' '.join(said.split())})")

    async def _prompts(self, client: aiohttp.ClientSession) -> None:
        self.model = self.model or await self._first_model(client)
        blocks = self.judge.stream.blocks
        first = _prompt(0)
        before = self.judge.events
        await self._complete(client, first)
        if not await _until(lambda: self.judge.events > before, WAIT_S):
            raise ApiError("a prompt was answered, and no event came")
        await asyncio.sleep(AT_ONCE_S / 3)
        blocks.stored_again = 0
        await self._complete(client, first)
        await asyncio.sleep(AT_ONCE_S / 3)
        # engines compute the last block once more, for the sake of its last token: a copy
        if blocks.stored_again > 1:
            text = f"a prompt that was sent twice stored {blocks.stored_again} of its live blocks again"
            self.judge.ledger.broken("7.3", text)
        else:
            self.judge.ledger.kept("7.3")
        gate = asyncio.Semaphore(_TOGETHER)

        async def one(number: int) -> None:
            async with gate:
                await self._complete(client, _prompt(number))

        await asyncio.gather(*(one(number) for number in range(1, self.prompts)))

    async def _reset(self, client: aiohttp.ClientSession) -> None:
        path = await self._reset_path(client)
        await self._emptied(client, f"POST {path}", self._ask_reset(client, path))

    async def _reset_path(self, client: aiohttp.ClientSession) -> Reset:
        """Find the engine's reset. The question changes nothing."""
        for path in Reset:
            async with client.options(self.base + path, allow_redirects=False) as answer:
                if answer.status != 404:
                    return path
        raise ApiError(f"neither {' nor '.join(Reset)} is there (vLLM needs VLLM_SERVER_DEV_MODE=1)")

    async def _ask_reset(self, client: aiohttp.ClientSession, path: Reset) -> None:
        for method in ("POST", "GET"):  # the first versions of SGLang know GET alone
            async with client.request(method, self.base + path, allow_redirects=False) as answer:
                if answer.status == 405 and method == "POST":
                    continue
                text = (await answer.content.read(engine_api.MAX_ANSWER)).decode(errors="replace")
                if not 200 <= answer.status < 300 or _says_no(text):
                    raise ApiError(f"{method} {path}: {answer.status} {' '.join(text.split())[:200]}".rstrip())
                return

    async def _sleep(self, client: aiohttp.ClientSession) -> None:
        async def sleep() -> None:
            async with client.post(self.base + "/sleep?level=1", allow_redirects=False) as answer:
                if answer.status != 200:
                    raise ApiError(f"POST /sleep: {answer.status}")

        try:
            await self._emptied(client, "POST /sleep", sleep())
        finally:
            async with client.post(self.base + "/wake_up", allow_redirects=False):
                pass
        await self._complete(client, _prompt(0))

    async def _emptied(self, client: aiohttp.ClientSession, what: str, work: Any) -> None:
        """Empty the cache, and see whether a clear comes at once; then store something behind it."""
        await asyncio.sleep(AT_ONCE_S / 3)  # an engine with requests running may do nothing
        blocks = self.judge.stream.blocks
        before, live = blocks.clears, len(blocks)
        await work
        if not live:
            raise ApiError(f"{what}: no block was live")
        at_once = await _until(lambda: blocks.clears > before, AT_ONCE_S)
        if at_once:
            self.judge.ledger.kept("11.2")
        elif not len(blocks):
            self.judge.ledger.kept("11.2")  # by removals
        if what != "POST /sleep":
            await self._complete(client, _prompt(0))
            await asyncio.sleep(AT_ONCE_S / 3)
        if not at_once and len(blocks):
            later = " (it came with the next prompt)" if blocks.clears > before else ""
            self.judge.ledger.broken("11.2", f"{what}: no AllBlocksCleared within {AT_ONCE_S:g} s{later}")

    async def _first_model(self, client: aiohttp.ClientSession) -> str:
        async with client.get(self.base + "/v1/models") as answer:
            found = await answer.json(content_type=None)
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ApiError(f"GET /v1/models: {answer.status}, and no model; --model names one") from error

    async def _complete(self, client: aiohttp.ClientSession, prompt: str) -> None:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        async with client.post(self.base + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                text = (await answer.content.read(200)).decode(errors="replace")
                raise ApiError(f"POST /v1/completions: {answer.status} {text}")
            await answer.read()


def _says_no(text: str) -> bool:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or one that is nested without end
        return False
    return isinstance(answer, dict) and answer.get("success") is False


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until it holds; return whether it does."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > end:
            return False
        await asyncio.sleep(0.05)
    return True


def _prompt(number: int) -> str:
    """A prompt that shares no block with those of other numbers, and is the same in every run."""
    return " ".join(f"{number} {word * 7919 % 1009}" for word in range(_WORDS // 2))
