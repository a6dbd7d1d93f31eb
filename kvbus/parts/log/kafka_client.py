"""Corrections of aiokafka, so that its clients can be cancelled, always close their connections, and skip bad batches.

A bad batch is one that aiokafka cannot decode. The module also finds out why a broker refuses kvbus.
"""

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
from kvbus.parts.log.location import REQUEST, KafkaLocation, reason_of
from kvbus.transport.tls_files import TlsFileError

PROBE: Final = 5.0
"""Timeout in seconds of a request that asks a broker why it refuses kvbus."""

ASK_SECONDS: Final = 5.0
"""Number of seconds after which kvbus checks whether the brokers refuse it, because a request has not finished.

aiokafka itself would try again forever.
"""

CLOSE: Final = 1.0
"""Timeout in seconds of closing a connection."""

T = TypeVar("T")

DENIED: Final[dict[type[Exception], tuple[str, str]]] = {
    errors.TopicAuthorizationFailedError: ("topic_denied", "no ACL allows this on the topic"),
    errors.UnknownTopicOrPartitionError: ("topic_missing", "there is no such topic"),
    errors.TransactionalIdAuthorizationFailed: ("transactional_id_denied", "no ACL allows this transactional id"),
    errors.ClusterAuthorizationFailedError: ("cluster_denied", "no ACL allows this on the cluster"),
    errors.SaslAuthenticationFailed: ("authentication_failed", "authentication failed: no such user, or its password"),
    errors.UnsupportedSaslMechanismError: ("authentication_failed", "the broker does not offer SCRAM-SHA-512"),
    errors.IllegalSaslStateError: ("authentication_failed", "the broker expects no password at this port"),
}
"""By the type of an aiokafka error: the reason for kvbus's counters, and a sentence for the operator."""

SILENT: Final = (errors.SaslAuthenticationFailed, errors.UnsupportedSaslMechanismError, errors.IllegalSaslStateError)
"""Types of errors whose own text is not added to the sentence in :data:`DENIED`, because it says nothing new."""


@contextlib.asynccontextmanager
async def translated_errors(location: KafkaLocation) -> AsyncIterator[None]:
    """Run the body of an ``async with`` statement. Convert errors of aiokafka to those that every kind of log raises.

    If an error does not say why the request failed, ask a broker for the reason.

    Raises:
        FencedError: another producer has started with the same transactional id.
        UnavailableError: any other error.
    """
    try:
        yield
    except errors.ProducerFenced as error:
        raise FencedError("another producer has this transactional id") from error
    # An AssertionError also means that the request failed: aiokafka raises it if its transaction has failed before.
    except (
        errors.KafkaError,
        errors.IllegalStateError,
        TlsFileError,
        OSError,
        TimeoutError,
        AssertionError,
    ) as error:
        raise _named(error) or await cause(location) or UnavailableError(_text(error)) from error


async def insisted(location: KafkaLocation, options: dict[str, Any], work: Coroutine[Any, Any, T]) -> T:
    """Wait up to :data:`REQUEST` seconds for a coroutine of aiokafka, which by itself would try again forever.

    Meanwhile ask the brokers from time to time. Stop waiting as soon as a broker refuses kvbus.

    Args:
        location: the servers of the log.
        options: the options for TLS and authentication that the coroutine's client uses. kvbus asks the brokers with
            the same options, even if the TLS and password files have changed since.
        work: the coroutine.

    Raises:
        UnavailableError: a broker refuses kvbus, or the coroutine has not ended in time.
    """
    time = asyncio.get_running_loop().time
    task = asyncio.ensure_future(work)
    until, found = time() + REQUEST, None
    try:
        while not (await asyncio.wait([task], timeout=min(ASK_SECONDS, until - time())))[0]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(PROBE, until - time())):
                    found = await cause(location, options)
            if found is not None and found.reason != UNREACHABLE:
                raise found
            if time() >= until:
                text = f"not done in {REQUEST:.0f} s: too few brokers, or too few in-sync replicas"
                raise found or UnavailableError(text)
        return task.result()
    finally:
        if not task.done():
            await end_tasks([task])


async def cause(location: KafkaLocation, options: dict[str, Any] | None = None) -> UnavailableError | None:
    """Find out why the brokers refuse kvbus: request the metadata of the log's topics from one broker after the other.

    Return the error that explains it; None if a broker returns the topics.

    ``options`` are the client's options for TLS and authentication. If they are None, they are read from the files.
    """
    found: UnavailableError | None = None
    for host, port in location.addresses:
        try:
            known = location.options() if options is None else options
            answer = await shown(host, port, known, [location.topic, location.pointers])
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
    """Request the metadata of these topics from one broker, over a separate connection, and return the broker's answer.

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
    """Return an UnavailableError that says why an operation of aiokafka failed; None if the reason is unknown.

    The reason may be that of ``error`` itself, or of an error that caused it.
    """
    return reason_of(error, "kafka", _known)


def _known(error: BaseException) -> tuple[str, str] | None:
    for kind, (reason, sentence) in DENIED.items():
        if isinstance(error, kind):
            return reason, sentence + (f" ({error.args[0]})" if error.args and kind not in SILENT else "")
    return None


STOP: Final = 2.0
"""Maximum time in seconds for committing the open transaction, and for closing a client's connections."""


class Keys:
    """A deserializer of record keys that returns each key unchanged, and has the list of undecodable record batches.

    aiokafka passes the deserializer to the object that unpacks a partition's record batches. kvbus replaces that object
    by its own version. This version finds the list here, and adds the record batches that it cannot decode.
    """

    def __init__(self, refused: Refused) -> None:
        self.refused = refused

    def __call__(self, key: bytes | None) -> bytes | None:
        """Deserialize the key of a record: return its bytes unchanged, or None if the record has no key."""
        return key


class _Batches:
    """The record batches in one answer of a broker. ``newest`` is the batch that :meth:`next_batch` returned last."""

    def __init__(self, records: Any) -> None:
        self.has_next = records.has_next
        self._next_batch = records.next_batch
        self.newest: Any = None

    def next_batch(self) -> Any:
        self.newest = self._next_batch()
        return self.newest


class _Readable(fetcher.PartitionRecords):  # type: ignore[misc]
    """A partition's records, without the record batches that aiokafka cannot decode.

    A record batch is a group of records that one producer has sent together. aiokafka cannot decode it if a header is
    not UTF-8, or if a compression library is not installed. It would then stop reading the partition. This class skips
    the batch, so records are missing only in the streams of this batch's producer.
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

    aiokafka's own `stop` would wait forever if the broker does not accept the records.
    """

    async def stop(self) -> None:
        """Close the connections. Records that are not committed are lost."""
        self._closed = True
        if self._sender is not None:
            await self._sender.close()
        await self.client.close()


def inner(client: AIOKafkaConsumer | AIOKafkaProducer) -> AIOKafkaClient:
    """Return the low-level client of a consumer or producer. It has the connections and the list of brokers."""
    return client.client if isinstance(client, AIOKafkaProducer) else client._client  # noqa: SLF001 - it has no name


def shield_bootstrap(of: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    """Change a client so that it finishes its first requests to a broker even if its start is cancelled.

    Otherwise aiokafka would not close the connection of these requests.
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
    """Close a client's connections, and prevent it from opening new ones.

    aiokafka's `stop` cancels a client that is still starting. So it is called in a separate task. Errors are ignored,
    because the client is not needed any more.
    """
    try:
        await close_within(client.stop(), STOP)
    finally:
        _give_up(inner(client))


def _give_up(client: AIOKafkaClient) -> None:
    """Close the connections that a failed or slow `stop` has left open, and end the client's remaining tasks.

    aiokafka's producer cancels one of its tasks and waits for its other tasks. While the broker accepts no records,
    these tasks connect again and again. After this call, they are cancelled as soon as they ask for a connection or for
    the list of topics.
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
    """A dictionary of connections, which replaces that of a stopped client and closes each connection that is added.

    The client may have been opening a connection when it was stopped, and adds the connection once it is open.
    """

    def __setitem__(self, key: tuple[Any, Any], connection: AIOKafkaConnection) -> None:
        connection.close()
        super().__setitem__(key, connection)


def client_options(location: KafkaLocation, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with which every client of aiokafka is created.

    ``options`` are those of TLS and authentication.
    """
    return {"bootstrap_servers": location.servers.split(","), "request_timeout_ms": int(1000 * REQUEST), **options}


def partition_of(key: str, partitions: int) -> int:
    """Return the number of the partition to which Kafka's own clients write records with this key.

    ``partitions`` is the topic's number of partitions.
    """
    return int(murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def partitions_of(client: AIOKafkaClient, topic: str) -> list[TopicPartition]:
    """Return all partitions of a topic.

    Raises:
        UnknownTopicOrPartitionError: the client's broker does not know the topic.
    """
    found = sorted(client.cluster.partitions_for_topic(topic) or ())
    if not found:
        raise errors.UnknownTopicOrPartitionError(topic)
    return [TopicPartition(topic, number) for number in found]


async def leaders(client: AIOKafkaClient, options: dict[str, Any], topics: list[str]) -> dict[TopicPartition, int]:
    """Return the broker that leads each partition, according to most of the brokers that have the partition.

    All brokers are asked, because a broker that is cut off from the other brokers does not notice that it is no longer
    the leader, and lacks newer records.

    If only two brokers have the partition, the answer of one broker is enough. Otherwise nothing could be read while
    the other broker is down. A partition is missing in the result if too few brokers agree.
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
