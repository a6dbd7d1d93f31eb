"""Invalid data that another program than kvbus might write into a log. Tests give it to kvbus's readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from kvbus.parts.log.kafka_client import partition_of
from kvbus.parts.log.location import POINTERS
from kvbus.parts.log.record import RANDOM_BITS, SCHEMA, TURN_BITS
from kvbus.parts.log.redis_client import names
from tests.log.kinds import Kafka, Memory, Nats, Redis
from tests.log.records import checked

NUMBERS: Final = (
    b"",
    b"a word",
    b"9" * 10_000,
    b"\xff\xfe",
    b"-1",
    b"1e300",
    b"nan",
    b"0",
    b"%d" % 2**62,
    b"%d" % 2**70,
)
"""Values that a test writes into a record's field in which a reader expects a number."""

LATE: Final = (2**TURN_BITS - 1) << RANDOM_BITS
"""The highest epoch number, after which no other epoch can begin."""

POINTERS_LIKE: Final[tuple[Any, ...]] = (
    b"\xc1",
    b"a word",
    b"\xff\xfe",
    b"\x91" * 5000,
    *map(
        msgspec.msgpack.encode,
        (
            None,
            [],
            [1],
            ["1", 2, 3],
            [-1, 0, 0],
            [0, 0, 0],
            [2**62, 0, 0],
            [1, 2**62, 0],
            [1, 0, -1],
            [1, 0, 2**64 - 1],
        ),
    ),
)
RECORDS: Final = (
    b"",
    b"\xff" * 100,
    b"\x91" * 5000,
    checked(),
    checked("a word"),
    checked(SCHEMA + 1, {}),
    checked(SCHEMA, 0, 2**63 - 1, 2**63 - 1, b"", 0, 0, False, False, False),
    checked(SCHEMA, 0, 2**53 - 1, 2**26 - 1, b"", 0, 0, False, False, False),
    checked(SCHEMA, 1, LATE, 0, b"\xc1", 0, 0, False, False, False),
    checked(SCHEMA, 0, LATE, 1, b"\x93\x01\x91\x81\xa1a\xff\xc0", 2**63 - 1, 2**63 - 1, True, True, False),
    checked(SCHEMA, 4, LATE, 7, b"", 0, 0, True, True, True),
    checked(
        SCHEMA,
        0,
        LATE,
        2**26 - 2,
        b"\x93\xcb\x7f\xf0\0\0\0\0\0\0\x90\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
        0,
        0,
        True,
        True,
        False,
    ),
)


async def poisons(kind: Any, key: str) -> AsyncIterator[str]:
    """Write one unreadable value after the other into a log, and yield a name for each after it was written."""
    of: dict[type, Any] = {Memory: _memory, Kafka: _kafka, Nats: _nats, Redis: _redis}
    async for name in of[type(kind)](kind, key):
        yield name


async def _memory(kind: Memory, key: str) -> AsyncIterator[str]:
    for value in POINTERS_LIKE:
        kind.streams[key].pointer = value
        yield f"pointer {value[:20]!r}"


async def _redis(kind: Redis, key: str) -> AsyncIterator[str]:
    records, pointer = names(kind.place(""), key)

    async def run(*command: Any) -> str:
        async with kind.server.client() as client:
            await client.execute_command(*command)
        return f"{command[0]} {str(command[1:])[:100]}"

    for field in ("last", "epoch", "seq", "position", "before", "token"):
        for value in NUMBERS:
            yield await run("HSET", pointer, field, value)
    for data in RECORDS:
        yield await run("XADD", records, "*", "r", data)
    yield await run("XADD", records, "*", b"\xff", b"\xff")
    for name in (b"\xff\xfe", b"", b"a", b"kvbus.v1.%ff.b.c.0", b"kvbus.v1.a.b.c.9999999999", b"}:pointer{"):
        foreign = kind.prefix.encode() + b":{" + name + b"}"
        yield await run("HSET", foreign + b":pointer", "epoch", "1", "seq", "-1", "position", "0")
        yield await run("XADD", foreign, "*", "r", b"x")
    for wrong in (records, pointer):
        await run("DEL", wrong)
        yield await run("SET", wrong, "a word")
        await run("DEL", wrong)
        yield await run("RPUSH", wrong, "a word")
    await run("DEL", records, pointer)
    await run("HSET", pointer, "epoch", 1 << RANDOM_BITS, "seq", -1, "position", 0)
    yield await run("XADD", records, f"{2**64 - 1}-{2**64 - 1}", "r", b"x")


async def _nats(kind: Nats, key: str) -> AsyncIterator[str]:
    async def publish(subject: bytes, payload: bytes, header: bytes = b"") -> str:
        """Send a message to NATS without a client library, because libraries refuse some of these messages."""
        reader, writer = await asyncio.open_connection(*kind.server.address.split(":"))
        try:
            await reader.readline()
            if header:
                line = b"HPUB %s %d %d\r\n%s%s\r\n" % (subject, len(header), len(header + payload), header, payload)
            else:
                line = b"PUB %s %d\r\n%s\r\n" % (subject, len(payload), payload)
            writer.write(b'CONNECT {"verbose":false,"headers":true,"pedantic":false}\r\n' + line + b"PING\r\n")
            async with asyncio.timeout(20):
                assert await reader.readline() == b"PONG\r\n"
        finally:
            writer.close()
        return f"{subject[-20:]!r} {header[:40]!r} {payload[:20]!r}"

    records, pointers = f"{kind.stream}.".encode(), f"{kind.stream}{POINTERS}.".encode()
    for value in POINTERS_LIKE:
        yield await publish(pointers + key.encode(), value)
    for data in RECORDS:
        for payload in (data, msgspec.msgpack.encode([data])):
            yield await publish(records + key.encode(), payload)
    yield await publish(records + key.encode(), msgspec.msgpack.encode([b"x"] * 2000))
    for header in (
        b"N",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 408 x\r\n\r\n",
        b"NATS/1.0 \xff\xff\r\n\r\n",
        b"NATS/1.0\r\nStatus: 503\r\n\r\n",
        b"NATS/1.0\r\n\xff\xfe: \xff\r\nx\r\n\r\n",
        b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: " + b"9" * 10_000 + b"\r\n\r\n",
    ):
        yield await publish(records + key.encode(), b"x", header)
        yield await publish(pointers + key.encode(), b"x", header)
    for name in (
        b"\xff\xfe",
        b"a\x0cb",
        b"a\x0bb",
        b"a\x00b",
        b"a",
        b"kvbus.v1.%ff.b.c.0",
        b"kvbus.v1.a.b.c.9999999999",
        b"s" * 3000,
    ):
        yield await publish(records + name, b"x")
        yield await publish(pointers + name, msgspec.msgpack.encode([1, -1, 0]))


async def _kafka(kind: Kafka, key: str) -> AsyncIterator[str]:
    producer = AIOKafkaProducer(bootstrap_servers=kind.broker.address)
    client = AIOKafkaClient(bootstrap_servers=kind.broker.address)
    await producer.start()
    await client.bootstrap()
    pointers = kind.topic + POINTERS
    try:
        for value in (None, *POINTERS_LIKE):
            await producer.send_and_wait(pointers, value, key=key.encode())
            yield f"pointer {value[:20] if value else value!r}"
        late = int(1000 * time.time()) + 3_000_000  # a broker accepts times up to an hour in the future
        for data in (None, *RECORDS):
            await producer.send_and_wait(kind.topic, data, key=key.encode(), timestamp_ms=late)
            yield f"record {data[:20] if data else data!r}"
        for name in (None, b"", b"\xff\xfe", b"a", b"kvbus.v1.%ff.b.c.0", b"kvbus.v1.a.b.c.9999999999"):
            for topic in (kind.topic, pointers):
                if topic == kind.topic or name is not None:  # a compacted topic takes no record without a key
                    await producer.send_and_wait(topic, msgspec.msgpack.encode([1, -1, 0]), key=name)
                yield f"key {name!r}"
        for topic in (kind.topic, pointers):
            await client.force_metadata_update()
            await _with_a_header(client, topic, partition_of(key, kind.partitions), key.encode())
            yield f"a header in {topic}"
    finally:
        await producer.stop()
        await client.close()


async def _with_a_header(client: AIOKafkaClient, topic: str, partition: int, key: bytes) -> None:
    """Append a batch whose header name is not UTF-8. Brokers accept it, but client libraries do not write it."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 10_000)
    builder.append(0, timestamp=int(time.time() * 1000), key=key, value=b"x", headers=[("NAME", b"x")])
    batch = bytearray(builder.build().replace(b"NAME", b"\xff\xfe\xfd\xfc"))
    batch[17:21] = calc_crc32c(bytes(batch[21:])).to_bytes(4, "big")
    client.add_topic(topic)
    await client.force_metadata_update()
    leader = next(each.nodeId for each in client.cluster.brokers())
    answer = await client.send(leader, ProduceRequest(None, 1, 10_000, [(topic, [(partition, bytes(batch))])]))
    ((_, ((_, code, *_),)),) = answer.topics
    assert code == 0, code
