"""The interface between the daemon and a discoverer.

It consists of the discoverer's methods, of the values that the daemon passes to it, and of the description of an engine
that it has found.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from kvbus.common.errors import Problem
from kvbus.config import endpoint_offset
from kvbus.config.endpoints import MAX_PORT
from kvbus.config.values import Section
from kvbus.core.events import RelayEvent

MAX_NAME: Final = 63
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")


class DiscoveryError(Exception):
    """The service that lists the engines (DNS, Kubernetes, an engine, …) cannot be queried, or its answer is not valid.

    The error's text is for the operator.
    """


class EntryError(Exception):
    """The entry of one engine, or of one rank, has an invalid value. The other entries of the answer are not affected.

    Args:
        problem: the invalid value. Its ``key`` says where the operator finds the value, such as an annotation of a pod.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Publisher:
    """The endpoints of the event publisher of one data-parallel rank of an engine.

    Attributes:
        rank: the number of the rank within the engine, from 0.
        endpoint: the endpoint at which the rank publishes its live stream.
        replay_endpoint: the endpoint that answers replay requests; None if the rank offers no replay.
    """

    rank: int
    endpoint: str
    replay_endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that a discoverer has found.

    Attributes:
        name: the engine's name, as :func:`fitting_name` returns it. It identifies the engine: if an engine with this
            name appears at another address, kvbus treats it as the same worker.
        publishers: the endpoints of the engine's ranks, in ascending order of the ranks.
        where: a description of the place where the engine was found, for the operator.
        topic: the ZeroMQ topic under which the engine publishes; None if the discoverer does not know it.
        api: the base URL of the engine's own HTTP API; None if the discoverer does not know it.
        faults: the invalid values in the entries of this engine, for the operator. A rank with an invalid value is
            missing from ``publishers``. While an engine has a fault, kvbus keeps the engine's earlier ranks.
        size: the number of the engine's ranks, including those with an invalid value; 0 if the discoverer does not
            know it. Without faults it is not needed.
    """

    name: str
    publishers: tuple[Publisher, ...]
    where: str
    topic: str | None = None
    api: str | None = None
    faults: tuple[Problem, ...] = ()
    size: int = 0

    @property
    def labels(self) -> list[str]:
        """The label of each rank in :attr:`publishers`, as metrics have it."""
        several = max(self.size, len(self.publishers)) > 1
        return [f"{self.name}/{each.rank}" if several else self.name for each in self.publishers]


@dataclass(frozen=True, slots=True)
class Services:
    """The values that the daemon passes to one discoverer.

    Attributes:
        name: the name of the ``sources`` entry. A discoverer of a single engine uses it as the engine's name.
        data_parallel_size: the number of ranks of an engine, used if the discoverer cannot find out that number.
        disconnected: an event that the daemon sets when the connection to an engine of this discoverer is lost. The
            discoverer may then query its service immediately, before its usual interval has passed. The discoverer
            itself clears the event.
    """

    name: str
    data_parallel_size: int
    disconnected: asyncio.Event


class Discoverer(Protocol):
    """The interface of a class that finds engines.

    The daemon constructs a discoverer from its settings and the daemon's services. A discoverer opens no connection and
    no file before :meth:`watch` is called.
    """

    Settings: ClassVar[type[Section]]
    """The class that reads the configuration keys of this kind of discoverer."""

    def __init__(self, settings: Any, services: Services) -> None: ...

    def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield the complete set of engines: first as soon as it is known, then each time it may have changed.

        An empty set means that there is no engine. If the discoverer cannot find out the set, it raises an error. The
        daemon then keeps the previous set, and calls ``watch`` again later. An engine whose entry is invalid is in the
        set, with its :attr:`Engine.faults`, and does not hide the other engines. The generator never ends by itself.
        Once it is closed, it holds no resources. Each of its requests has a timeout.

        Raises:
            DiscoveryError: the discoverer cannot find out the set now.
        """


@runtime_checkable
class Carrier(Discoverer, Protocol):
    """A discoverer that also delivers its engines' batches, or their records in a log, to the relay.

    kvbus does not connect to the endpoints of these engines, because only the carrier can read them.
    """

    @property
    def counts(self) -> Counter[str]:
        """Number of log records that this carrier has read and not passed to the relay, by reason."""

    @property
    def lag(self) -> float:
        """Number of seconds by which this carrier (a discoverer that also reads a log for the relay) may lag.

        It has read everything that the log had this many seconds ago.
        """

    def open(self, endpoint: str, slot: int, feed: Callable[[RelayEvent], None], drained: Callable[[], None]) -> None:
        """Begin to pass an engine's batches or log records to the relay, as those of the source number ``slot``.

        Args:
            endpoint: the engine's endpoint, from the set that :meth:`watch` has yielded.
            slot: the number of the source in the relay.
            feed: function that passes one event to the relay.
            drained: function to call when all events that were available have been passed.
        """

    def close(self, slot: int) -> None:
        """Stop passing batches or records to the relay's source with the number ``slot``."""


def publishers(endpoint: str, replay_endpoint: str | None, ranks: int) -> tuple[Publisher, ...]:
    """Return the endpoints of all ranks of an engine, computed from the endpoints of rank 0.

    The port of rank r is the port of rank 0 plus r. :func:`~kvbus.config.endpoint_offset` has the rule for ``ipc://``.

    Args:
        endpoint: the endpoint of rank 0's live stream.
        replay_endpoint: the endpoint of rank 0's replay; None if the engine offers no replay.
        ranks: the number of ranks.

    Raises:
        EntryError: an endpoint is not valid, or a port would be above 65535.
    """
    return tuple(
        Publisher(
            rank,
            _offset("endpoint", endpoint, rank),
            None if replay_endpoint is None else _offset("replay_endpoint", replay_endpoint, rank),
        )
        for rank in range(ranks)
    )


def _offset(key: str, endpoint: str, rank: int) -> str:
    try:
        return endpoint_offset(endpoint, rank)
    except ValueError as error:
        raise EntryError(Problem(key, str(error), endpoint, "tcp://10.0.0.3:5557")) from error


def publishers_at(
    host: str, port: int, replay_port: int | None, ranks: int, keys: tuple[str, str] = ("port", "replay_port")
) -> tuple[Publisher, ...]:
    """Return the endpoints of all ranks of an engine on a host, computed from the ports of rank 0.

    Args:
        host: the engine's host: a name or an address.
        port: the port of rank 0's live stream.
        replay_port: the port of rank 0's replay; None if the engine offers no replay.
        ranks: the number of ranks.
        keys: the places from which the two ports come, for the operator.

    Raises:
        EntryError: the port of some rank would not be between 1 and 65535.
    """
    for key, each, example in zip(keys, (port, replay_port), ("5557", "5558"), strict=True):
        if each is not None and not 1 <= each <= MAX_PORT + 1 - ranks:
            why = f", because the {ranks} ranks have consecutive ports" if ranks > 1 else ""
            raise EntryError(Problem(key, f"must be between 1 and {MAX_PORT + 1 - ranks}{why}", str(each), example))
    base = f"tcp://{host_in_url(host)}"
    return publishers(f"{base}:{port}", None if replay_port is None else f"{base}:{replay_port}", ranks)


def fitting_name(text: str) -> str:
    """Return a name for an engine that is valid as a label of metrics.

    ``text`` itself is returned if its characters and its length are allowed. Otherwise the forbidden characters are
    replaced, the text is shortened, and a fingerprint of ``text`` is appended. Two different texts have different
    names, and the same text always has the same name.
    """
    fits = _UNFIT.sub("-", text)
    if fits == text and 0 < len(text) <= MAX_NAME:
        return text
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{fits[: MAX_NAME - 11]}-{fingerprint}"


def host_in_url(host: str) -> str:
    """Return a host in the form that endpoints need: an IPv6 address in brackets, any other host unchanged."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
