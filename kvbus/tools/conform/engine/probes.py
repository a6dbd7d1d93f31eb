"""Probes of a running publisher: requests to its replay and snapshot endpoints, and to the engine's HTTP API.

In the HTTP API, prompts are sent to the paths of OpenAI's API. For the cache and the event endpoints, each engine has
its own paths.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from kvbus.config.endpoints import endpoint_offset
from kvbus.parts.discovery.contract import DiscoveryError
from kvbus.parts.discovery.engine_answers import of_sglang, of_vllm
from kvbus.tools.conform.engine.clauses import Ledger
from kvbus.tools.conform.engine.events import EventReader
from kvbus.tools.conform.engine.judge import LONG_ANSWER, Answer, EngineJudge
from kvbus.tools.conform.report import Evidence
from kvbus.transport import engine_api
from kvbus.transport.client.raw import Asker
from kvbus.transport.curve import Curve

TIMEOUT: Final = 10.0
"""Maximum seconds to wait for the next message of an answer."""
SHORT_S: Final = 3.0
"""Maximum seconds to wait for an answer that the specification does not require."""
_SILENT: Final = 8
"""Number of requesters that request a replay and do not read the answer. By clause 4.8, they must not delay others."""
_HOLD_S: Final = 1.0
_BEYOND: Final = 2**40
"""Distance from the newest seq to a seq that the publisher has certainly not sent yet."""
_MOST_FRAMES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """The publisher that ``kvbus conform engine`` watches, and the options of the command.

    Attributes:
        endpoint: endpoint of the live stream.
        replay: replay endpoint; None without one.
        snapshot: snapshot endpoint; None without one.
        api: URL of an OpenAI-style API; None without one.
        model: model for the prompts; empty for the first model that the API lists.
        topic: subscription prefix.
        bind: whether to bind the endpoint instead of connecting to it.
        curve: CURVE keys; None without CURVE.
        seconds: minimum seconds to watch.
        prompts: number of different prompts to send.
        await_restart: whether to watch until the publisher has restarted.
        rank: rank of the publisher; None for the rank that its first batch names.
    """

    endpoint: str
    replay: str | None = None
    snapshot: str | None = None
    api: str | None = None
    model: str = ""
    topic: bytes = b""
    bind: bool = False
    curve: Curve | None = field(default=None, repr=False)
    seconds: float = 30.0
    prompts: int = 32
    await_restart: bool = False
    rank: int | None = None

    @classmethod
    def of(cls, endpoint: str, curve: Curve | None = None, **options: Any) -> Target:
        """Return the target that the options of ``kvbus conform engine`` describe."""
        api, topic = options.pop("api"), options.pop("topic").encode()
        url = None if api is None else (api if "://" in api else f"http://{api}").rstrip("/")
        return cls(endpoint, api=url, topic=topic, curve=curve, **options)

    def of_rank(self, rank: int) -> Target:
        """Return the target of another rank.

        Each of its ports is the port of rank 0 plus the rank, as clause 1.2 of docs/spec/kv-events.md requires.

        Raises:
            ValueError: an endpoint is malformed, or its port would be above 65535.
        """
        replay, snapshot = (each and endpoint_offset(each, rank) for each in (self.replay, self.snapshot))
        return replace(self, endpoint=endpoint_offset(self.endpoint, rank), replay=replay, snapshot=snapshot, rank=rank)


class Asking:
    """The sender of replay and snapshot requests to a publisher, which also judges the answers.

    Args:
        judge: records the observations.
        target: the publisher.
    """

    def __init__(self, judge: EngineJudge, target: Target) -> None:
        self._judge = judge
        self._replay, self._snapshot, self._curve = target.replay, target.snapshot, target.curve

    async def ask(self, start: int) -> Answer | None:
        """Request a replay, judge the answer, and return it. Return None if the publisher has no replay endpoint."""
        if self._replay is None:
            return None
        answer = Answer(start)
        async with Asker(self._replay, curve=self._curve) as asker:
            asker.ask(b"", start.to_bytes(8, "big"))
            await self._read(asker, answer, TIMEOUT)
        self._judge.answer(answer)
        return answer

    async def probe(self, heard: Callable[[], int]) -> None:
        """Send unusual replay requests, and judge the answers.

        ``heard`` returns the number of live batches so far. By this number, the kit notices whether the publisher
        continues to publish while it answers (clause 1.4).
        """
        if self._replay is None:
            return
        before = heard()
        beyond = (self._judge.stream.expected or 0) + _BEYOND
        await self.ask(beyond)
        complete = await self.ask(0)
        if during := heard() - before:
            self._judge.ledger.kept("1.4", during)
        await self._without_delimiter(beyond)
        if complete is not None and len(complete.messages) > LONG_ANSWER:
            await self._beside_silent_ones()

    async def _without_delimiter(self, start: int) -> None:
        assert self._replay is not None  # noqa: S101 - asked before
        answer = Answer(start, delimited=False)
        async with Asker(self._replay, curve=self._curve) as asker:
            asker.ask(start.to_bytes(8, "big"))
            await self._read(asker, answer, SHORT_S)
        last = answer.messages[-1] if answer.messages else []
        if not last:
            wrong = f"a request without the empty frame got no answer in {SHORT_S:g} s"
        else:
            in_kind = answer.ended and len(last) <= 3
            wrong = (
                "" if in_kind else "the answer to a request without the empty frame has no END, or has the empty frame"
            )
        shown = [Evidence(f"frame {at}", frame) for at, frame in enumerate(last[:4])]
        self._judge.ledger.judge("4.1", wrong, *shown)

    async def _beside_silent_ones(self) -> None:
        """Request a replay while other requesters do not read their answers.

        These requesters must not delay the replay (clause 4.8).

        Then let one of these requesters read its answer slowly. No batch of its answer must be missing (clause 4.3).
        """
        assert self._replay is not None  # noqa: S101 - asked before
        async with AsyncExitStack() as stack:
            silent = []
            for _ in range(_SILENT):
                asker = await stack.enter_async_context(Asker(self._replay, curve=self._curve, slow=True))
                asker.ask(b"", bytes(8))
                silent.append(asker)
            await asyncio.sleep(_HOLD_S)
            healthy = await self.ask(0)
            wrong = f"an answer had no END while {_SILENT} other requesters did not read theirs"
            self._judge.ledger.judge("4.8", "" if healthy is not None and healthy.ended else wrong)
            answer = Answer(0, slow=True)
            await self._read(silent[0], answer, TIMEOUT)
            self._judge.answer(answer)

    async def snapshot(self) -> None:
        """Request a snapshot, and judge the form of the answer by clause 5.5.

        Do nothing without a snapshot endpoint.
        """
        if self._snapshot is None:
            return
        ledger = self._judge.ledger
        async with Asker(self._snapshot, curve=self._curve, most=_MOST_FRAMES) as asker:
            asker.ask(b"snapshot")
            try:
                frames = await asyncio.wait_for(asker.recv(), TIMEOUT)
            except TimeoutError:
                ledger.broken("5.5", f"a request for a snapshot got no answer in {TIMEOUT:g} s")
                return
        body = frames[1:] if frames[0] == b"" else frames
        shown = [Evidence(f"frame {at}", frame) for at, frame in enumerate(frames[:3])]
        if len(body) < 2 or len(body[0]) != 8 or len(body[1]) != 16:
            ledger.broken("5.5", "a snapshot does not begin with a number of 8 bytes and an id of 16 bytes", *shown)
            return
        number = int.from_bytes(body[0], "big", signed=True)
        first = EventReader(Ledger()).read(body[2], number) if len(body) > 2 else None
        if number >= 0 and (first is None or not first.clears_first):
            ledger.broken("5.5", "the batches of a snapshot do not begin with AllBlocksCleared", *shown)
        elif number < -2:
            ledger.broken("5.5", f"a snapshot has the invalid number {number}", *shown)
        else:
            ledger.kept("5.5")

    @staticmethod
    async def _read(asker: Asker, answer: Answer, seconds: float) -> None:
        """Read messages into an answer until END, or until no message comes for ``seconds`` seconds."""
        try:
            while not answer.add(await asyncio.wait_for(asker.recv(), seconds)):
                pass
        except TimeoutError:
            return


WAIT_S: Final = 10.0
"""Maximum seconds to wait for the events that a prompt causes."""
AT_ONCE_S: Final = 3.0
"""Maximum seconds from emptying the engine's cache until AllBlocksCleared must come, by clause 11.2."""
MAX_PAIRS: Final = 200
"""Maximum number of pairs of numbers of which a prompt consists.

A prompt of this length fills several blocks at any usual block size, and fits in the 2,048 tokens of small models.
"""
_PAIR_TOKENS: Final = 8
"""Maximum number of tokens of one of the pairs of numbers that a prompt consists of; see :data:`MAX_PAIRS`.

It is reached if each digit and each space is a token.
"""
_TOGETHER: Final = 4


class ApiError(Exception):
    """The engine's HTTP API rejects a request, or fails to execute it."""


class Reset(StrEnum):
    """The path of the HTTP request that resets an engine's cache."""

    VLLM = "/reset_prefix_cache"
    """The path at vLLM, which needs ``VLLM_SERVER_DEV_MODE=1``. The request resets the cache on the device."""
    SGLANG = "/flush_cache"
    """The path at SGLang. The request resets the cache on every tier."""


class Api:
    """A client of an engine's API. Its requests make the engine publish events, and it judges these events.

    Args:
        judge: records the observations.
        target: the publisher and its API.
        notes: the list to which a note about each failed step is added, for the report.
    """

    def __init__(self, judge: EngineJudge, target: Target, notes: list[str]) -> None:
        self.judge = judge
        self.base = target.api or ""
        self.model = target.model
        self.prompts = target.prompts
        self.notes = notes
        self._pairs = MAX_PAIRS

    async def provoke(self) -> None:
        """Run all steps.

        Request the engine's list of event endpoints, send prompts, reset the cache, and put the engine to sleep.

        A failed step adds a note, and the next step follows. If the prompts fail, the remaining steps are left out.
        """
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
        host, problems = urlsplit(self.base).hostname or "", ""
        for path, read in (("/kv_event_sources", of_vllm), ("/server_info", of_sglang)):
            async with client.get(self.base + path, allow_redirects=False) as answer:
                if answer.status != 200:
                    problems += f"{path}: {answer.status} "
                    continue
                try:
                    found = read(json.loads(await answer.text()), host)
                    problems += "".join(f"{path}: {fault} " for fault in found.faults)
                    if found.publishers and not found.faults:
                        self.judge.ledger.kept("1.3")
                        return
                except (DiscoveryError, ValueError) as error:
                    problems += f"{path}: {error} "
        self.judge.ledger.broken("1.3", f"the API does not name the event endpoints ({' '.join(problems.split())})")

    async def _prompts(self, client: aiohttp.ClientSession) -> None:
        await self._find_model(client)
        blocks = self.judge.stream.blocks
        first = self._prompt(0)
        before = self.judge.events
        await self._complete(client, first)
        if not await _until(lambda: self.judge.events > before, WAIT_S):
            raise ApiError("the API answered a prompt, but no event came")
        await asyncio.sleep(AT_ONCE_S / 3)
        blocks.stored_again = 0
        await self._complete(client, first)
        await asyncio.sleep(AT_ONCE_S / 3)
        # One of the blocks may be stored again. For a completely cached prompt, engines compute the last block again,
        # because they need the model's output after the last token.
        wrong = f"a prompt that was sent twice stored {blocks.stored_again} of its live blocks again"
        self.judge.ledger.judge("7.3", wrong if blocks.stored_again > 1 else "")
        gate = asyncio.Semaphore(_TOGETHER)

        async def one(number: int) -> None:
            async with gate:
                await self._complete(client, self._prompt(number))

        await asyncio.gather(*(one(number) for number in range(1, self.prompts)))

    async def _reset(self, client: aiohttp.ClientSession) -> None:
        path = await self._reset_path(client)
        await self._emptied(client, f"POST {path}", self._ask_reset(client, path))

    async def _reset_path(self, client: aiohttp.ClientSession) -> Reset:
        """Return the path at which the engine's cache can be reset.

        It is found with OPTIONS requests, because they change nothing at the engine.
        """
        for path in Reset:
            async with client.options(self.base + path, allow_redirects=False) as answer:
                if answer.status != 404:
                    return path
        raise ApiError(f"neither {' nor '.join(Reset)} exists (vLLM needs VLLM_SERVER_DEV_MODE=1)")

    async def _ask_reset(self, client: aiohttp.ClientSession, path: Reset) -> None:
        for method in ("POST", "GET"):  # early versions of SGLang accept only GET
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
        await self._complete(client, self._prompt(0))

    async def _emptied(self, client: aiohttp.ClientSession, what: str, work: Any) -> None:
        """Empty the cache, and judge by clause 11.2 whether AllBlocksCleared comes within `AT_ONCE_S` seconds.

        Then store blocks again, except after putting the engine to sleep.

        Args:
            client: the HTTP session.
            what: the HTTP request that empties the cache, such as ``POST /sleep``. Error messages and verdicts name it.
            work: the coroutine that empties the cache.
        """
        await asyncio.sleep(AT_ONCE_S / 3)  # an engine may ignore a reset while requests run
        blocks = self.judge.stream.blocks
        before, live = blocks.clears, len(blocks)
        await work
        if not live:
            raise ApiError(f"{what} proves nothing about clause 11.2, because no block was live before it")
        at_once = await _until(lambda: blocks.clears > before, AT_ONCE_S)
        # Instead of sending AllBlocksCleared, the engine may have removed all blocks one by one, which has the same
        # effect.
        if at_once or not len(blocks):
            self.judge.ledger.kept("11.2")
        if what != "POST /sleep":
            await self._complete(client, self._prompt(0))
            await asyncio.sleep(AT_ONCE_S / 3)
        if not at_once and len(blocks):
            later = " (it came with the next prompt)" if blocks.clears > before else ""
            self.judge.ledger.broken("11.2", f"{what}: no AllBlocksCleared within {AT_ONCE_S:g} s{later}")

    async def _find_model(self, client: aiohttp.ClientSession) -> None:
        """Ask the API for the name of the model and, at vLLM, the maximum length of a prompt (``max_model_len``)."""
        async with client.get(self.base + "/v1/models") as answer:
            found = await answer.json(content_type=None)
        try:
            models = {str(each["id"]): each.get("max_model_len") for each in found["data"]}
            self.model = self.model or next(iter(models))
        except (KeyError, StopIteration, TypeError, AttributeError) as error:
            if not self.model:
                text = f"GET /v1/models was answered with {answer.status} and names no model; name one with --model"
                raise ApiError(text) from error
            return
        limit = models.get(self.model)
        if isinstance(limit, int):
            self._pairs = max(1, min(MAX_PAIRS, limit // _PAIR_TOKENS - 1))

    def _prompt(self, number: int) -> str:
        """Return the prompt with the number ``number``.

        It shares no block with the other prompts, and is the same in every run.
        """
        return " ".join(f"{number} {word * 7919 % 1009}" for word in range(self._pairs))

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
    except (ValueError, RecursionError):  # the text is not JSON, or is nested too deeply
        return False
    return isinstance(answer, dict) and answer.get("success") is False


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds. Return False if it does not hold within ``seconds`` seconds."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > end:
            return False
        await asyncio.sleep(0.05)
    return True
