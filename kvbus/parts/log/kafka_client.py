"""Clients of Kafka that can be given up, that close what they open, and that say why a broker refuses kvbus."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition, errors
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import create_conn
from aiokafka.partitioner import murmur2
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest

from kvbus.common.tasks import close_within, end_tasks
from kvbus.parts.log.contract import UNREACHABLE, UNREADABLE_BATCH, FencedError, Refused, UnavailableError
from kvbus.parts.log.place import REQUEST, Place, causes, refusal
from kvbus.transport.tls_files import TlsFileError

PROBE: Final = 5.0
"""Seconds that a broker has to say why it takes nobody."""

ASK: Final = 5.0
"""Seconds of a request before a broker is asked why it takes so long."""

CLOSE: Final = 1.0
"""Seconds that a connection has to close."""

STOP: Final = 2.0
"""Seconds that a client has to commit, and to close its connections."""

MAX_RECORDS: Final = 500
"""Maximum number of records taken at once."""

END: Final = -1
"""In an OffsetRequest: a time after that of every record."""

FIRST: Final = -2
"""In an OffsetRequest: a time before that of every record."""

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
    """Raise errors of the client as those of the contract. Where an error names no reason, ask a broker for it.

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
    """Ask one broker for these topics, by a connection of its own, and return its answer.

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


class Producer(AIOKafkaProducer):  # type: ignore[misc]
    """A producer whose stop does not wait until the broker has taken every record, which may be never."""

    async def stop(self) -> None:
        """Close the connections. Records that are not committed are lost."""

        def given_up(*_: object, **__: object) -> asyncio.Future[None]:
            found = asyncio.get_running_loop().create_future()
            found.cancel()
            return found

        self._closed = True
        # the sender's tasks retry for as long as a broker takes nothing: now they end at their next request
        self.client.ready = self.client.force_metadata_update = given_up
        try:
            await self.client.close()  # requests under way fail now, and not after their time
            if self._sender is not None:
                await self._sender.close()
        finally:
            await self.client.close()


async def begin(work: Coroutine[Any, Any, None]) -> None:
    """Run what connects a client. It goes on for up to `STOP` seconds if the caller is cancelled.

    aiokafka does not close a connection if its first request is cancelled.
    """
    beginning = asyncio.ensure_future(work)
    try:
        await asyncio.shield(beginning)
    except asyncio.CancelledError:
        await asyncio.wait([beginning], timeout=STOP)
        raise
    finally:
        if not beginning.done():
            await end_tasks([beginning])


async def stop(*clients: AIOKafkaConsumer | AIOKafkaProducer | AIOKafkaClient) -> None:
    """Close the connections of clients. What takes longer than `STOP` seconds goes on after that."""

    async def stop_all() -> None:
        for client in clients:
            with contextlib.suppress(errors.KafkaError, OSError):
                await (client.close() if isinstance(client, AIOKafkaClient) else client.stop())

    await close_within(stop_all(), STOP)


async def topic_client(place: Place, options: dict[str, Any], topic: str) -> AIOKafkaClient:
    """Return a client without records, which knows the brokers and a topic's partitions."""
    client = AIOKafkaClient(**client_options(place, options))
    try:
        await begin(client.bootstrap())
        await client.set_topics([topic])
    except BaseException:
        await stop(client)
        raise
    return client


class UndecodableError(Exception):
    """The consumer cannot decode a batch: a header is not UTF-8, or a compression is not installed."""


Fetched = dict[TopicPartition, list[ConsumerRecord]]


async def fetch(
    consumer: AIOKafkaConsumer, positions: Mapping[TopicPartition, int], seconds: float, refused: Refused
) -> Fetched:
    """Take the records that a consumer has fetched, without the batches that it cannot decode.

    A batch has one producer, so records are missing in that producer's streams alone.

    Args:
        consumer: the consumer.
        positions: the offset after the last record taken, of each partition that is read.
        seconds: time to wait for a record.
        refused: gets the batches that cannot be decoded.
    """
    with contextlib.suppress(UndecodableError):
        return await _getmany(consumer, *positions, seconds=seconds)
    # aiokafka has dropped records that it decoded before, of any partition: read them again
    for part, position in positions.items():
        consumer.seek(part, position)
    fetched: Fetched = {}
    for part, position in positions.items():
        if position < (consumer.highwater(part) or 0):
            try:
                fetched |= await _getmany(consumer, part, seconds=seconds)
            except UndecodableError:
                consumer.seek(part, position)
                fetched |= await _fetch_past(consumer, part, seconds, refused)
    return fetched


async def _fetch_past(consumer: AIOKafkaConsumer, part: TopicPartition, seconds: float, refused: Refused) -> Fetched:
    """Take records one by one, up to the first after a batch that cannot be decoded."""
    records: list[ConsumerRecord] = []
    bad = False
    while True:
        try:
            found = await _getmany(consumer, part, seconds=seconds, most=1)
        except UndecodableError:
            offset = await consumer.position(part)
            if not bad:
                refused.append((UNREADABLE_BATCH, f"{part.topic}, partition {part.partition}, offset {offset}"))
            bad = True
            consumer.seek(part, offset + 1)  # it is fetched again as long as the next offset lies in it
        else:
            records += found.get(part, [])
            if bad or not found:
                return {part: records} if records else {}


async def _getmany(
    consumer: AIOKafkaConsumer, *parts: TopicPartition, seconds: float, most: int = MAX_RECORDS
) -> Fetched:
    """Take fetched records.

    Raises:
        UndecodableError: the next batch of a partition cannot be decoded.
    """
    try:
        fetched: Fetched = await consumer.getmany(*parts, timeout_ms=int(1000 * seconds), max_records=most)
    except errors.UnsupportedCodecError as error:
        raise UndecodableError from error
    except errors.KafkaError:
        raise
    except (ValueError, RuntimeError, EOFError, zlib.error) as error:
        raise UndecodableError from error
    return fetched


def client_options(place: Place, options: dict[str, Any]) -> dict[str, Any]:
    """What every client takes, with those of TLS and authentication."""
    return {"bootstrap_servers": place.servers.split(","), "request_timeout_ms": int(1000 * REQUEST), **options}


def partition_of(key: str, partitions: int) -> int:
    """Where Kafka's own clients put a key."""
    return int(murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def partitions_of(client: AIOKafkaClient, topic: str) -> list[TopicPartition]:
    """Return all partitions of a topic.

    Raises:
        TopicAuthorizationFailedError: no ACL allows kvbus to see it.
        UnknownTopicOrPartitionError: the broker that was asked knows none.
    """
    if topic in client.cluster.unauthorized_topics:
        raise errors.TopicAuthorizationFailedError(topic)
    found = sorted(client.cluster.partitions_for_topic(topic) or ())
    if not found:
        raise errors.UnknownTopicOrPartitionError(topic)
    return [TopicPartition(topic, number) for number in found]


async def offset(client: AIOKafkaClient, leader: int | None, part: TopicPartition, time: int) -> int:
    """Ask a partition's leader for its first offset (``FIRST``), or for the one after its last (``END``)."""
    answer = await client.send(leader, OffsetRequest(-1, 0, [(part.topic, [(part.partition, time)])]))
    ((_, ((_, code, *_, found),)),) = answer.topics
    if code:
        raise errors.for_code(code)(part.topic)
    return int(found)


async def leaders(client: AIOKafkaClient, options: dict[str, Any], topic: str) -> dict[TopicPartition, int]:
    """Return the node that leads each partition, according to most of the brokers that have it.

    A broker that is cut off from the others does not know that it leads no more, and its end of a partition is old. Of
    two brokers one is enough: nobody could read otherwise while the other one is away. A partition is left out if too
    few brokers agree.
    """
    votes: dict[TopicPartition, Counter[int]] = {}
    sizes: dict[TopicPartition, int] = {}
    asked = {
        asyncio.ensure_future(shown(each.host, each.port, options, [topic])): each.nodeId
        for each in client.cluster.brokers()
    }

    def agreed(part: TopicPartition, needed: float) -> int | None:
        ((leader, count),) = votes[part].most_common(1)
        return leader if leader >= 0 and count >= needed * sizes[part] else None

    left = set(asked)
    try:
        async with asyncio.timeout(PROBE):
            while left and not (votes and all(agreed(part, 0.51) is not None for part in votes)):
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    with contextlib.suppress(errors.KafkaError, OSError, TimeoutError):
                        for code, _, _, parts in each.result().topics:
                            for _, number, leader, replicas, *_ in () if code else parts:
                                if asked[each] in replicas:
                                    part = TopicPartition(topic, number)
                                    votes.setdefault(part, Counter())[leader] += 1
                                    sizes[part] = len(replicas)
    except TimeoutError:
        pass
    finally:
        await end_tasks(left)
    return {part: leader for part in votes if (leader := agreed(part, 0.5)) is not None}
