"""What Kafka and its client say, in the words of the contract: fenced, or away and why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, TypeVar

from aiokafka import errors
from aiokafka.conn import create_conn
from aiokafka.protocol.metadata import MetadataRequest

from kvbus.common.tasks import end_tasks
from kvbus.parts.log.contract import UNREACHABLE, FencedError, UnavailableError
from kvbus.parts.log.place import Place
from kvbus.parts.log.refusals import REQUEST, causes, refusal
from kvbus.transport.tls_files import TlsFileError

PROBE: Final = 5.0
"""Seconds that a broker has to say why it takes nobody."""

ASK: Final = 5.0
"""Seconds of a request before a broker is asked why it takes so long."""

CLOSE: Final = 1.0
"""Seconds that a connection has to close."""

T = TypeVar("T")

DENIED: Final[dict[type[Exception], tuple[str, str]]] = {
    errors.TopicAuthorizationFailedError: ("topic_denied", "no ACL allows this on the topic"),
    errors.UnknownTopicOrPartitionError: ("topic_missing", "there is no such topic"),
    errors.TransactionalIdAuthorizationFailed: ("transactional_id_denied", "no ACL allows this transactional id"),
    errors.ClusterAuthorizationFailedError: ("cluster_denied", "no ACL allows this on the cluster"),
    errors.SaslAuthenticationFailed: ("authentication_failed", "authentication failed: no such user, or its password"),
    errors.UnsupportedSaslMechanismError: ("authentication_failed", "the broker takes no SCRAM-SHA-512"),
    errors.IllegalSaslStateError: ("authentication_failed", "the broker wants no password at this port"),
}
"""By error: the reason, and the same as a sentence."""

SILENT: Final = (errors.SaslAuthenticationFailed, errors.UnsupportedSaslMechanismError, errors.IllegalSaslStateError)
"""Those that have nothing to add."""


@contextlib.asynccontextmanager
async def said(place: Place) -> AsyncIterator[None]:
    """Errors of the client in the words of the contract; one that does not say why is looked into.

    Raises:
        FencedError: another producer has the transactional id.
        UnavailableError: anything else.
    """
    try:
        yield
    except errors.ProducerFenced as error:
        raise FencedError("another producer has this transactional id") from error
    # an assertion is how the client says that a transaction has failed before
    except (
        errors.KafkaError,
        errors.IllegalStateError,
        TlsFileError,
        OSError,
        TimeoutError,
        AssertionError,
    ) as error:
        raise _named(error) or await cause(place) or UnavailableError(_text(error)) from error


async def insisted(place: Place, options: dict[str, Any], work: Coroutine[Any, Any, T]) -> T:
    """What the client tries for ever, for :data:`REQUEST`, or until a broker says that it will not.

    Args:
        place: where the log is.
        options: what the client has: the files may hold something else by now.
        work: what it does.

    Raises:
        UnavailableError: a broker refuses kvbus, or nobody has done it in that time.
    """
    time = asyncio.get_running_loop().time
    task = asyncio.ensure_future(work)
    until, found = time() + REQUEST, None
    try:
        while not (await asyncio.wait([task], timeout=min(ASK, until - time())))[0]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(PROBE, until - time())):
                    found = await cause(place, options)
            if found is not None and found.reason != UNREACHABLE:
                raise found
            if time() >= until:
                text = f"not done in {REQUEST:.0f} s: too few brokers, or replicas that are in sync"
                raise found or UnavailableError(text)
        return task.result()
    finally:
        if not task.done():
            await end_tasks([task])


async def cause(place: Place, options: dict[str, Any] | None = None) -> UnavailableError | None:
    """Why a broker does not let kvbus in, or shows it no topics; None if one does.

    Without ``options`` the files say who kvbus is.
    """
    found: UnavailableError | None = None
    for host, port in place.addresses:
        try:
            known = place.options() if options is None else options
            answer = await shown(host, port, known, [place.topic, place.pointers])
            for code, topic, *_ in answer.topics:
                if code:
                    raise errors.for_code(code)(topic)
        except (errors.KafkaError, OSError, TimeoutError, TlsFileError) as error:
            if found is None or found.reason == UNREACHABLE:
                found = _named(error) or UnavailableError(f"{host}:{port}: {_text(error)}")
        else:
            return None
    return found


async def shown(host: str, port: int, options: dict[str, Any], topics: list[str]) -> Any:
    """What one broker says of these topics, by a connection of its own.

    Raises:
        KafkaError, OSError, TimeoutError: it does not.
    """
    async with asyncio.timeout(PROBE):
        connection = await create_conn(host, port, request_timeout_ms=int(1000 * PROBE), **options)
        try:
            answer = await connection.send(MetadataRequest(topics, allow_auto_topic_creation=False))
        finally:
            closed = connection.close()
    if closed is not None:
        await asyncio.wait([closed], timeout=CLOSE)
    return answer


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _named(error: BaseException) -> UnavailableError | None:
    """The reason that an error, or what it came from, has."""
    for at in causes(error):
        for kind, (reason, sentence) in DENIED.items():
            if isinstance(at, kind):
                what = f" ({at.args[0]})" if at.args and kind not in SILENT else ""
                return UnavailableError(sentence + what, reason)
        found = refusal(at, "kafka")
        if found is not None:
            return found
    return None
