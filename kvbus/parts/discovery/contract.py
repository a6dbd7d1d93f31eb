"""The contract of discoverers: what one is given, and what it says of the engines it has found."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from kvbus.config import endpoint_offset
from kvbus.config.values import Section
from kvbus.core.events import RelayEvent

MAX_NAME: Final = 63
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")


class DiscoveryError(Exception):
    """Who knows the engines cannot be asked, or what comes back is no answer. The text is for people."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """One data-parallel rank of an engine.

    Attributes:
        rank: its number within the engine.
        endpoint: its live stream.
        replay_endpoint: its replay, if there is one.
    """

    rank: int
    endpoint: str
    replay_endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that was found.

    Attributes:
        name: who it is, wherever it is: the same name at another address is the same worker. See :func:`fitting_name`.
        publishers: its ranks, by their number.
        where: the place at which it was found, for people.
        topic: the topic under which it publishes; None if that is not known.
        api: the base URL of its own HTTP API, if that is known.
    """

    name: str
    publishers: tuple[Publisher, ...]
    where: str
    topic: str | None = None
    api: str | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """The daemon's services for one discoverer.

    Attributes:
        name: the entry's, for who finds one engine that says no name.
        data_parallel_size: ranks of an engine of which no number is known.
        disconnected: set when the connection to an engine has ended that this discoverer has found. It may look at
            once then; it clears the event itself.
    """

    name: str
    data_parallel_size: int
    disconnected: asyncio.Event


class Discoverer(Protocol):
    """Finds engines. It is made with its settings and the daemon's services, and opens nothing before :meth:`watch`."""

    Settings: ClassVar[type[Section]]
    """The keys of this kind."""

    def __init__(self, settings: Any, services: Services) -> None: ...

    def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield all engines, first as soon as they are known, then whenever the set may have changed.

        An empty set is an answer: there is no engine. Who cannot find out raises instead, and is asked again later by
        a new ``watch``; until then the set before stays in force. The generator never ends by itself, holds nothing
        once it is closed, and gives every request a deadline.

        Raises:
            DiscoveryError: the set cannot be found out now.
        """


@runtime_checkable
class Carrier(Discoverer, Protocol):
    """One that also brings what its engines publish: their endpoints are its own, and nobody dials them."""

    @property
    def counts(self) -> Counter[str]:
        """What it has not handed on, by reason."""

    @property
    def lag(self) -> float:
        """Seconds since the newest time of which is known that everything was read that was there."""

    def open(self, endpoint: str, slot: int, feed: Callable[[RelayEvent], None], drained: Callable[[], None]) -> None:
        """Hand on what an engine publishes as the source in this slot; ``drained`` follows each burst."""

    def close(self, slot: int) -> None:
        """Hand on no more of it."""


def publishers(endpoint: str, replay_endpoint: str | None, ranks: int) -> tuple[Publisher, ...]:
    """Return the ranks of an engine whose rank r is at port + r.

    Raises:
        DiscoveryError: an endpoint is none.
    """
    try:
        return tuple(
            Publisher(
                rank,
                endpoint_offset(endpoint, rank),
                None if replay_endpoint is None else endpoint_offset(replay_endpoint, rank),
            )
            for rank in range(ranks)
        )
    except ValueError as error:
        raise DiscoveryError(str(error)) from error


def fitting_name(text: str) -> str:
    """Return a name that fits into a metrics label: the text itself, or what fits of it and a fingerprint of the whole.

    Two texts have two names, and the same text always has the same one.
    """
    fits = _UNFIT.sub("-", text)
    if fits == text and 0 < len(text) <= MAX_NAME:
        return text
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{fits[: MAX_NAME - 11]}-{fingerprint}"


def host_in_url(host: str) -> str:
    """Return a host as it stands in an endpoint: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
