"""A discoverer that asks every node of one SGLang engine over gRPC for its publishers.

If an SGLang engine runs on several nodes, only the first node has an HTTP API. But each node answers the gRPC method
``GetServerInfo`` with its own publishers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec

from kvbus.common.errors import Problem
from kvbus.config.endpoints import parse_address
from kvbus.config.front import GrpcAddress
from kvbus.config.values import Seconds, Section, key
from kvbus.parts.discovery.contract import DiscoveryError, Engine, Publisher, Services
from kvbus.parts.discovery.engine_answers import Answer, of_sglang
from kvbus.parts.discovery.engine_grpc import JSON_INFO, SERVER_INFO, aio, message_fields, open_channel

TIMEOUT: Final = 5.0
"""Timeout in seconds of a gRPC call to one node of the engine."""


class GrpcSettings(Section):
    """The configuration keys of ``discover: {grpc: …}``."""

    nodes: tuple[GrpcAddress, ...] = key(
        ...,
        "gRPC addresses (`--grpc-port`) of all nodes of one SGLang engine. kvbus adds the engine under this "
        "entry's name, with the ranks of all nodes.",
        example=["10.0.0.3:50051", "10.0.0.4:50051"],
        min_length=1,
    )
    interval: Seconds = key(
        5.0,
        "Interval between two calls. After the connection to an engine is lost, kvbus calls at once.",
        example=5.0,
        unit="s",
        gt=0,
    )


class GrpcDiscoverer:
    """A discoverer that asks one SGLang engine over gRPC; see :class:`~kvbus.parts.discovery.contract.Discoverer`."""

    Settings = GrpcSettings

    def __init__(self, settings: GrpcSettings, services: Services) -> None:
        self._settings = settings
        self._services = services

    async def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield a tuple with the one engine each time all configured addresses of the engine have answered.

        The tuple is empty if no rank of the engine publishes events. An invalid answer of a node is a fault of the
        engine.
        """
        disconnected, nodes = self._services.disconnected, self._settings.nodes
        where = f"grpc {', '.join(nodes)}"
        channels = [open_channel(node) for node in nodes]
        try:
            while True:
                disconnected.clear()
                asked = [self._ask(*each) for each in zip(nodes, channels, strict=True)]
                yield _merged(await asyncio.gather(*asked)).engines(self._services.name, where)
                try:
                    async with asyncio.timeout(self._settings.interval):
                        await disconnected.wait()
                except TimeoutError:
                    pass
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))

    async def _ask(self, node: str, channel: Any) -> Answer:
        try:
            answer = await channel.unary_unary(SERVER_INFO)(b"", timeout=TIMEOUT)
            info = {field.number: field.value for field in message_fields(answer)}.get(JSON_INFO)
            return of_sglang(msgspec.json.decode(info if isinstance(info, bytes) else b""), parse_address(node)[0])
        except aio.AioRpcError as error:
            raise DiscoveryError(f"{node}: {error.code().name}: {error.details()}") from error
        except (DiscoveryError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return Answer((), None, (Problem(f"answer of {node}", str(error)),))


def _merged(answers: list[Answer]) -> Answer:
    """Return one answer with the publishers of all nodes, in ascending order of the ranks.

    Raises:
        DiscoveryError: two nodes list the same rank with different endpoints. This happens with an SGLang whose answers
            lack ``kv_event_sources``: each node then lists the ranks of all nodes, at its own host.
    """
    ranks: dict[int, Publisher] = {}
    for each in (publisher for answer in answers for publisher in answer.publishers):
        if ranks.setdefault(each.rank, each) != each:
            where = f"rank {each.rank} is at {ranks[each.rank].endpoint} and at {each.endpoint}"
            raise DiscoveryError(f"the nodes disagree: {where}")
    topics = {answer.topic for answer in answers if answer.publishers}
    topic = topics.pop() if len(topics) == 1 else None
    faults = tuple(fault for answer in answers for fault in answer.faults)
    return Answer(tuple(ranks[rank] for rank in sorted(ranks)), topic, faults)
