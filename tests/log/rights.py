"""Create users and ACLs at a Kafka broker, with the rights of its administrator."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import Any, NamedTuple

from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import CompactArray, CompactBytes, CompactString, Int8, Int16, Int32, Schema, TaggedFields

from tests.log.broker import Broker

SHA512 = 2
ITERATIONS = 4096


class Resource(IntEnum):
    TOPIC = 2
    TRANSACTIONAL_ID = 5


class Operation(IntEnum):
    READ = 3
    WRITE = 4
    DELETE = 6
    DESCRIBE = 8


class Acl(NamedTuple):
    """A right of a Kafka user, as one call of ``kafka-acls.sh --add`` gives it."""

    operation: Operation
    resource: Resource
    name: str
    prefixed: bool = False


class _ScramResponse(Response):  # type: ignore[misc]
    API_KEY = 51
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "results",
            CompactArray(
                ("user", CompactString("utf-8")),
                ("error_code", Int16),
                ("error_message", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _ScramStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 51
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _ScramResponse
    SCHEMA = Schema(
        ("deletions", CompactArray(("name", CompactString("utf-8")), ("mechanism", Int8), ("tags", TaggedFields))),
        (
            "upsertions",
            CompactArray(
                ("name", CompactString("utf-8")),
                ("mechanism", Int8),
                ("iterations", Int32),
                ("salt", CompactBytes),
                ("salted_password", CompactBytes),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _Scram(Request[_ScramStruct]):  # type: ignore[misc]
    API_KEY = 51

    def __init__(self, name: str, password: str) -> None:
        salt = b"salt of a test"
        salted = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, ITERATIONS)
        self._row: Any = (name, SHA512, ITERATIONS, salt, salted, {})

    def build(self, request_struct_class: type[_ScramStruct]) -> _ScramStruct:
        return request_struct_class([], [self._row], {})


class Rights:
    """An administrator's client that changes the users and ACLs of one Kafka broker."""

    def __init__(self, client: AIOKafkaClient) -> None:
        self._client = client

    async def user(self, name: str, password: str) -> None:
        """Create a user with this password, or change the user's password."""
        response = await self._send(_Scram(name, password))
        assert [row[1] for row in response.results] == [0], response

    async def allow(self, principal: str, *acls: Acl) -> None:
        for acl in acls:
            response = await self._send(CreateAclsRequest(*_row(acl, principal)))
            assert [row[0] for row in response.creation_responses] == [0], response

    async def withdraw(self, principal: str, *acls: Acl) -> None:
        for acl in acls:
            response = await self._send(DeleteAclsRequest(*_row(acl, principal)))
            (found,) = response.filter_responses
            assert (found[0], len(found[2])) == (0, 1), response

    async def _send(self, request: Request[Any]) -> Any:
        return await self._client.send(self._client.get_random_node(), request)


def _row(acl: Acl, principal: str) -> tuple[Any, ...]:
    return acl.resource, acl.name, 4 if acl.prefixed else 3, f"User:{principal}", "*", acl.operation, 3


@contextlib.asynccontextmanager
async def rights(broker: Broker) -> AsyncIterator[Rights]:
    client = AIOKafkaClient(bootstrap_servers=broker.address)
    await client.bootstrap()
    try:
        yield Rights(client)
    finally:
        await client.close()
