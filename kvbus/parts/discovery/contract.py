"""The contract of discoverers: their arguments, and how they describe the engines that they find."""

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
    """The service that knows the engines cannot be queried, or its answer is not valid. The text is for people."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """One data-parallel rank of an engine.

    Attributes:
        rank: the rank's number within the engine.
        endpoint: the live stream's endpoint.
        replay_endpoint: the replay's endpoint, None if there is no replay.
    """

    rank: int
    endpoint: str
    replay_endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that a discoverer has found.

    Attributes:
        name: identifies the engine, wherever it runs: an engine with the same name at another address is the same
            worker. See :func:`fitting_name`.
        publishers: the engine's ranks, in ascending order.
        where: where the engine was found, as a text for people.
        topic: the topic under which the engine publishes; None if it is not known.
        api: the base URL of the engine's own HTTP API; None if it is not known.
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
        name: the name of the ``sources`` entry. A discoverer uses it for a single engine that has no name.
        data_parallel_size: the number of ranks of an engine that does not tell its own.
        disconnected: set when the connection to an engine that this discoverer has found was lost. The discoverer may
            then look once immediately. It clears the event itself.
    """

    name: str
    data_parallel_size: int
    disconnected: asyncio.Event


class Discoverer(Protocol):
    """A discoverer finds engines.

    The daemon makes it with its settings and the daemon's services. It opens nothing before :meth:`watch`.
    """

    Settings: ClassVar[type[Section]]
    """The configuration keys of this kind."""

    def __init__(self, settings: Any, services: Services) -> None: ...

    def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield all engines: first as soon as they are known, then whenever the set may have changed.

        An empty set means that there is no engine. A discoverer that cannot find out raises an error instead. The
        daemon then calls ``watch`` again later, and keeps the previous set until then. The generator never ends by
        itself, holds no resources once it is closed, and gives every request a deadline.

        Raises:
            DiscoveryError: the set cannot be found out now.
        """


@runtime_checkable
class Carrier(Discoverer, Protocol):
    """A discoverer that also delivers the batches or records of its engines.

    The endpoints of its engines are its own, and kvbus does not dial them.
    """

    @property
    def counts(self) -> Counter[str]:
        """Number of records that were not handed on, by reason."""

    @property
    def lag(self) -> float:
        """Seconds since the latest time up to which everything is known to be read."""

    def open(self, endpoint: str, slot: int, feed: Callable[[RelayEvent], None], drained: Callable[[], None]) -> None:
        """Hand on an engine's batches or records, as those of the source in this slot.

        Args:
            endpoint: the engine's endpoint, from the set that :meth:`watch` has yielded.
            slot: the source's slot.
            feed: called with each event.
            drained: called after each burst of events.
        """

    def close(self, slot: int) -> None:
        """Stop handing on the batches or records of the engine in this slot."""


def publishers(endpoint: str, replay_endpoint: str | None, ranks: int) -> tuple[Publisher, ...]:
    """Return the ranks of an engine that has rank r at port + r.

    Raises:
        DiscoveryError: an endpoint is not valid.
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
    """Return a name that fits into a metrics label.

    It is the text itself, or as much of it as fits, with a fingerprint of the complete text. Different texts have
    different names, and a text always has the same name.
    """
    fits = _UNFIT.sub("-", text)
    if fits == text and 0 < len(text) <= MAX_NAME:
        return text
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{fits[: MAX_NAME - 11]}-{fingerprint}"


def host_in_url(host: str) -> str:
    """Return a host as it is written in an endpoint, with IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
