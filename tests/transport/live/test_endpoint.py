"""Tests that an output tries to open its endpoint until it succeeds, and stops trying when the endpoint is closed."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import TYPE_CHECKING, Any

from kvbus.core.stats import OutputStats
from kvbus.transport.live.endpoint import REOPEN, reopening
from kvbus.transport.replay import ReplayServer, sender_of_output
from kvbus.transport.sockets import PLAIN
from kvbus.transport.zmtp.endpoint import Listener
from kvbus.transport.zmtp.mechanism import Role
from tests.ports import free_port
from tests.transport.loops import both_loops

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Prevent this process from opening a socket, by a limit of its file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


NOBODY: Any = None
"""Placeholder for the handler of peers. No test of this module connects a peer that completes its handshake."""


@both_loops
async def test_a_closed_endpoint_does_not_try_to_open_again(context: Any) -> None:
    del context
    port = free_port()

    def opened(handler: Any) -> Listener:
        return Listener(f"tcp://127.0.0.1:{port}", Role.PUB, handler)

    with no_descriptors():
        endpoint = reopening(opened)(NOBODY)
    endpoint.close()
    await asyncio.sleep(2 * REOPEN)
    assert not await listens(port)


@both_loops
async def test_the_second_reopening_of_a_replay_endpoint_replaces_the_first(context: Any) -> None:
    del context
    port = free_port()
    stats = OutputStats()
    endpoint = ReplayServer(
        f"tcp://127.0.0.1:{port}", on_request=NOBODY, sender=sender_of_output(stats, 1), stats=stats
    )
    with no_descriptors():
        endpoint.reopen(PLAIN)
    endpoint.reopen(PLAIN)
    assert await listens(port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read(100)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3 * REOPEN):
            assert await reader.read(100), "the first opening has closed it"
    writer.close()
    endpoint.close()
