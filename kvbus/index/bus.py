"""A bus as the index reads it over HTTP: the streams of one of its outputs, and the states of its sources."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvbus.client import Worker
from kvbus.common.errors import ExitCode, KvbusError
from kvbus.config.endpoints import endpoint_offset, parse_endpoint
from kvbus.config.values import render_template
from kvbus.tools.asking import Login, NoAnswerError, asking, get

log = logging.getLogger("kvbus.index")

T = TypeVar("T")

POLL_SECONDS: Final = 1.0
"""Seconds between two requests for the path ``/sources`` of a bus."""

_ANSWER_SECONDS: Final = 10.0


class UnusableError(KvbusError):
    """The bus has no output that the index can read."""

    exit_code = ExitCode.CONFIG


class Output(msgspec.Struct):
    """The settings of one of the bus's outputs that the index needs. They are in the bus's answer to ``/overview``."""

    name: str
    type: str
    endpoint: str
    replay_endpoint: str | None
    bind: bool
    layout: str
    token_ids: str
    topic: str | None
    curve_secret_key_file: str | None = None


class _Config(msgspec.Struct):
    worker: str
    model: str | None
    outputs: list[Output]


class _Overview(msgspec.Struct):
    config: _Config


class Source(msgspec.Struct, frozen=True):
    """A source of the bus: one entry of the answer to ``/sources``."""

    name: str
    rank: int
    slot: int
    state: str
    partial: bool


@dataclass(frozen=True, slots=True)
class Stream:
    """The address of an output stream: the endpoints that a subscriber needs to read the stream.

    ``by_topic`` says whether several streams share the endpoint and are distinguished by their topics.
    """

    endpoint: str
    replay_endpoint: str | None
    by_topic: bool = False


class Bus:
    """A bus whose configuration and sources the index reads over HTTP.

    Args:
        url: the URL of the bus's HTTP port.
        login: the bearer token and the certificate authorities for the connection.
        wanted: the name of the output to read. None means the first output that the index can read.
        curve: whether the index has CURVE keys.

    Attributes:
        worker: the value of the bus's setting ``worker``.
        model: the value of the bus's setting ``model``; empty if it is not set.
        answers: whether the bus answered the last request.
        asked: an event that is set after the first request, even if the bus did not answer it.
        reached: whether the bus has ever answered a request.
        sources: the sources in the bus's last answer.
        streams: the streams of the output that the index should follow, by name.
    """

    def __init__(self, url: str, login: Login, wanted: str | None = None, *, curve: bool = False) -> None:
        self.url: Final = url
        self.curve: Final = curve
        self.worker = ""
        self.model = ""
        self.answers = False
        self.asked: Final = asyncio.Event()
        self.reached = False
        self.sources: list[Source] = []
        self.streams: dict[str, Stream] = {}
        self._login: Final = login
        self._wanted: Final = wanted
        self._config: _Config | None = None
        """The configuration of the bus; None until it has been read.

        It is None again after a request without an answer, because the bus may come back with another configuration.
        """
        self._by_worker: dict[tuple[str, int | None], Source] = {}

    async def follow(self, changed: Callable[[], None]) -> None:
        """Read the bus's sources every :data:`POLL_SECONDS`, for ever. Call ``changed`` after each request.

        Raises:
            UnusableError: the bus has no output that the index can read.
        """
        async with self._login.session() as session:
            while True:
                try:
                    await self._ask(session)
                    self.answers = self.reached = True
                except NoAnswerError as error:
                    if self.answers or not self.asked.is_set():
                        log.warning("the bus does not answer, so the state of its sources is unknown: %s", error)
                    self.answers = False
                    self._config = None  # the bus may have another configuration when it answers again
                changed()
                self.asked.set()
                await asyncio.sleep(POLL_SECONDS)

    def source_of(self, worker: Worker) -> Source | None:
        """Return the source that a worker of the index belongs to.

        Return None if the worker belongs to another bus, or if this bus does not list the source.
        """
        return self._by_worker.get((worker.name, None)) or self._by_worker.get((worker.name, worker.rank))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        async with asking(self.url, _ANSWER_SECONDS):
            if self._config is None:
                overview = _decoded((await get(session, f"{self.url}/overview"))[0], _Overview)
                self._config, self.worker = overview.config, overview.config.worker
                self.model = overview.config.model or ""
            sources = _decoded((await get(session, f"{self.url}/sources"))[0], list[Source])
            output = readable_output(self._config.outputs, self._wanted, self.url, curve=self.curve)
            self.sources = sources
            # This fails if the bus is newer, and an endpoint or topic has a form that this version cannot read.
            self._take(output, self._config)

    def _take(self, output: Output, config: _Config) -> None:
        """Store the streams of the bus's output, and for each worker of the index the source that has its blocks."""
        endpoint = as_seen_from(output.endpoint, self.url)
        replay = None if output.replay_endpoint is None else as_seen_from(output.replay_endpoint, self.url)
        if output.layout == "merged":
            self.streams = {self.url: Stream(endpoint, replay)}
            self._by_worker = {(self.url, source.slot): source for source in self.sources}
            return
        if output.layout == "per_topic":
            self.streams = {self.url: Stream(endpoint, None, by_topic=True)}
            topics = {_topic(output, config, source): source for source in self.sources}
            self._by_worker = {(f"{self.url}/{topic}", None): source for topic, source in topics.items()}
            return
        names = {source.slot: f"{self.url} {source.name}" for source in self.sources}
        self.streams = {
            name: Stream(endpoint_offset(endpoint, slot), None if replay is None else endpoint_offset(replay, slot))
            for slot, name in names.items()
        }
        self._by_worker = {(names[source.slot], None): source for source in self.sources}

    def stream_of(self, source: Source) -> str:
        """Return the name of the output stream that has the batches of a source."""
        own = f"{self.url} {source.name}"
        return own if own in self.streams else self.url


def readable_output(outputs: list[Output], wanted: str | None, url: str, *, curve: bool) -> Output:
    """Return the output of a bus that the index reads: the output named ``wanted``, or the first that it can read.

    Raises:
        UnusableError: the index cannot read the wanted output, or any output if none is named.
    """
    why = []
    for output in outputs:
        if wanted not in {None, output.name}:
            continue
        wrong = _unreadable(output, curve=curve)
        if wrong is None:
            return output
        why.append(f"output {output.name} {wrong}")
    if not why:
        names = ", ".join(output.name for output in outputs) or "none"
        raise UnusableError(f"the bus at {url} has no output {wanted!r}; its outputs are: {names}")
    raise UnusableError(f"the index can read no output of the bus at {url}: {'; '.join(why)}")


def _unreadable(output: Output, *, curve: bool) -> str | None:
    """Return the reason why the index cannot read an output; None if it can read the output."""
    if output.type != "zmq":
        return f"is of type {output.type}, and the index reads zmq"
    if not output.bind:
        return "dials its router (bind: false)"
    if output.token_ids == "drop":
        return "has no token ids (token_ids: drop), so the index cannot find prompts by their tokens"
    if output.curve_secret_key_file is not None and not curve:
        return "requires CURVE: give --curve-secret-key and --curve-server-key"
    return None


def as_seen_from(endpoint: str, url: str) -> str:
    """Return an endpoint of the bus in a form to which the index can connect.

    If the endpoint is a wildcard address, such as ``tcp://*:5557``, it gets the host of the bus's URL.
    """
    address = parse_endpoint(endpoint)
    if address.is_ipc or not address.is_wildcard:
        return endpoint
    host = urlsplit(url).hostname or ""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{address.port}"


def _topic(output: Output, config: _Config, source: Source) -> str:
    """Return the topic of a source's stream; an empty text if the output keeps the topic that the engine uses."""
    if output.topic is None:
        return ""
    name = source.name.removesuffix(f"/{source.rank}")
    topic = render_template(output.topic, model=config.model or "", worker=config.worker, source=name, rank=source.rank)
    return topic.decode()


def _decoded(raw: bytes, form: type[T]) -> T:
    """Decode a JSON answer of the bus into an object of the type ``form``.

    Raises:
        ValueError: the answer does not match the type.
    """
    try:
        return msgspec.json.decode(raw, type=form)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
