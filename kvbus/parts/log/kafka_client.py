"""Clients of Kafka that can be cancelled, that close their connections, and that report why a broker refuses kvbus."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition, errors
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.consumer import fetcher
from aiokafka.partitioner import murmur2
from aiokafka.protocol.metadata import MetadataRequest

from kvbus.common.tasks import close_within, end_tasks
from kvbus.parts.log.contract import UNREACHABLE, UNREADABLE_BATCH, FencedError, Refused, UnavailableError
from kvbus.parts.log.place import REQUEST, Place, reason_of
from kvbus.transport.tls_files import TlsFileError

PROBE: Final = 5.0
"""Timeout for asking a broker why it refuses kvbus, in seconds."""

ASK: Final = 5.0
"""Seconds that a request may take before kvbus asks a broker for the cause."""

CLOSE: Final = 1.0
"""Timeout for closing a connection, in seconds."""

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
"""By the client's error: the reason for counters, and a sentence for people."""

SILENT: Final = (errors.SaslAuthenticationFailed, errors.UnsupportedSaslMechanismError, errors.IllegalSaslStateError)
"""Errors whose arguments add nothing to the sentence."""


@contextlib.asynccontextmanager
async def said(place: Place) -> AsyncIterator[None]:
    """Raise errors of the client as those of the contract. If an error names no reason, ask a broker for it.

    Raises:
        FencedError: another producer has the transactional id.
        UnavailableError: any other error.
    """
    try:
        yield
    except errors.ProducerFenced as error:
        raise FencedError("another producer has this transactional id") from error
    # the client raises an AssertionError if its transaction has failed before
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
    """Wait up to :data:`REQUEST` seconds for work that the client would repeat forever.

    Stop waiting as soon as a broker refuses kvbus.

    Args:
        place: the servers of the log.
        options: the client's options. The files may have changed since they were read.
        work: the client's work.

    Raises:
        UnavailableError: a broker refuses kvbus, or the work was not done in time.
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
    """Return why the brokers refuse kvbus or do not show it the topics; None if a broker does.

    Without ``options``, the TLS and authentication files are read.
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
    """Ask one broker for these topics, over a separate connection, and return its answer.

    Raises:
        KafkaError, OSError, TimeoutError: the broker does not answer.
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
    """Return the reason of an error, or of an error that caused it; None if there is no known reason."""
    return reason_of(error, "kafka", _known)


def _known(error: BaseException) -> tuple[str, str] | None:
    for kind, (reason, sentence) in DENIED.items():
        if isinstance(error, kind):
            return reason, sentence + (f" ({error.args[0]})" if error.args and kind not in SILENT else "")
    return None


STOP: Final = 2.0
"""Timeout for committing and for closing a client's connections, in seconds."""


class Keys:
    """A deserializer that returns keys unchanged.

    The client passes it to the records of each partition. So they find the refusals to which they report.
    """

    def __init__(self, refused: Refused) -> None:
        self.refused = refused

    def __call__(self, key: bytes | None) -> bytes | None:
        """Return the key unchanged."""
        return key


class _Batches:
    """The batches of one answer. The newest one is remembered."""

    def __init__(self, records: Any) -> None:
        self.has_next = records.has_next
        self._next_batch = records.next_batch
        self.newest: Any = None

    def next_batch(self) -> Any:
        self.newest = self._next_batch()
        return self.newest


class _Readable(fetcher.PartitionRecords):  # type: ignore[misc]
    """A partition's records, without the batches that the client cannot decode.

    A batch cannot be decoded if a header is not UTF-8, or a compression library is not installed. aiokafka would then
    stop reading the complete partition. A batch has one producer, so records are missing only in that producer's
    streams.
    """

    def __init__(self, part: TopicPartition, records: Any, *others: Any) -> None:
        self._batches = _Batches(records)
        super().__init__(part, self._batches, *others)
        self.next_fetch_offset: int

    def __next__(self) -> Any:
        while True:
            try:
                return super().__next__()
            except (ValueError, RuntimeError, EOFError, errors.UnsupportedCodecError, zlib.error):
                offset: int = self.next_fetch_offset
                self.next_fetch_offset = self._batches.newest.next_offset
                self._records_iterator = self._unpack_records()
                if isinstance(self._key_deserializer, Keys):
                    where = f"{self._tp.topic}, partition {self._tp.partition}, offset {offset}"
                    self._key_deserializer.refused.append((UNREADABLE_BATCH, where))


fetcher.PartitionRecords = _Readable


class Producer(AIOKafkaProducer):  # type: ignore[misc]
    """A producer whose `stop` does not wait until all records are sent.

    If the broker does not accept the records, aiokafka's own `stop` would wait forever.
    """

    async def stop(self) -> None:
        """Close the connections. Records that are not committed are lost."""
        self._closed = True
        if self._sender is not None:
            await self._sender.close()
        await self.client.close()


def inner(client: AIOKafkaConsumer | AIOKafkaProducer) -> AIOKafkaClient:
    """Return the inner client, which has the connections and knows the brokers."""
    return client.client if isinstance(client, AIOKafkaProducer) else client._client  # noqa: SLF001 - it has no name


def whole(of: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    """Let a client finish its first requests, even if the caller is cancelled.

    aiokafka would otherwise not close the connection of these requests.
    """
    client = inner(of)
    ask = client.bootstrap

    async def bootstrap() -> None:
        asking = asyncio.ensure_future(ask())
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(asking)
        except asyncio.CancelledError:
            try:
                await asyncio.wait([asking], timeout=STOP)
            finally:
                asking.cancel()
            raise

    client.bootstrap = bootstrap


async def stop(client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    """Close a client's connections, and keep it from opening new ones.

    Closing runs in a separate task, because a client that has just begun is cancelled by its own `stop`. Errors are
    ignored, because the client is not needed any more.
    """
    try:
        await close_within(client.stop(), STOP)
    finally:
        _give_up(inner(client))


def _give_up(client: AIOKafkaClient) -> None:
    """Close the connections that a failed or slow `stop` has left open, and end the tasks that still run.

    aiokafka's producer cancels one of its tasks and waits for the others. They connect again for as long as the broker
    accepts nothing. After this call they are cancelled as soon as they ask for a connection or for the topics.
    """

    def nothing(*_: object, **__: object) -> asyncio.Future[None]:
        found = asyncio.get_running_loop().create_future()
        found.cancel()
        return found

    client._get_conn = client.force_metadata_update = nothing  # noqa: SLF001 - it has no other way
    for waited in (client._sync_task, client._md_update_fut):  # noqa: SLF001
        if waited is not None:
            waited.cancel()
    client._conns = _Closing(client._conns)  # noqa: SLF001 - nobody else closes them
    for connection in client._conns.values():  # noqa: SLF001
        connection.close()


class _Closing(dict[tuple[Any, Any], AIOKafkaConnection]):
    """Connections of a client that was stopped.

    A connection that the client was still opening is closed once it is open.
    """

    def __setitem__(self, key: tuple[Any, Any], connection: AIOKafkaConnection) -> None:
        connection.close()
        super().__setitem__(key, connection)


def client_options(place: Place, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of every client, together with those of TLS and authentication."""
    return {"bootstrap_servers": place.servers.split(","), "request_timeout_ms": int(1000 * REQUEST), **options}


def partition_of(key: str, partitions: int) -> int:
    """Return the partition that Kafka's own clients choose for a key."""
    return int(murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def partitions_of(client: AIOKafkaClient, topic: str) -> list[TopicPartition]:
    """Return all partitions of a topic.

    Raises:
        UnknownTopicOrPartitionError: the broker that was asked does not know the topic.
    """
    found = sorted(client.cluster.partitions_for_topic(topic) or ())
    if not found:
        raise errors.UnknownTopicOrPartitionError(topic)
    return [TopicPartition(topic, number) for number in found]


async def leaders(client: AIOKafkaClient, options: dict[str, Any], topics: list[str]) -> dict[TopicPartition, int]:
    """Return the node that leads each partition, according to most of the brokers that have the partition.

    A broker that is cut off from the others does not know that it is not the leader any more, and its partitions' data
    is old. If a partition is on two brokers, the vote of one is enough. Otherwise nobody could read while the other one
    is away. A partition is left out if too few brokers agree.
    """
    votes: dict[TopicPartition, Counter[int]] = {}
    sizes: dict[TopicPartition, int] = {}
    asked = {
        asyncio.ensure_future(shown(each.host, each.port, options, topics)): each.nodeId
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
                        for code, topic, _, parts in each.result().topics:
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
