"""What a host name means, to the system and to libzmq."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass

from kvbus.transport.zmtp.addresses import ipc_address, split_tcp

Address = tuple[int, str | tuple[str, int]]
"""A family, and an address of it, as a socket connects to."""


@dataclass(frozen=True, slots=True)
class Found:
    """The addresses of an endpoint; ``first`` is the one that libzmq takes, and it takes no other."""

    first: Address
    others: tuple[Address, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, for people."""
        return tuple(shown(each) for each in (self.first, *self.others))


def shown(address: Address) -> str:
    """Return an address for people."""
    where = address[1]
    return where.replace("\0", "@", 1) if isinstance(where, str) else where[0]


async def find(endpoint: str) -> Found:
    """Look up an endpoint. The thread of a look-up that hangs holds nobody up, not even at the end of the process.

    Raises:
        OSError: its name does not resolve.
        ValueError: it is malformed.
    """
    path = ipc_address(endpoint)
    if path is not None:
        return Found((socket.AF_UNIX, path))
    host, port = split_tcp(endpoint)
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Found] = loop.create_future()

    def say(answer: Found | OSError) -> None:
        if found.done():
            return
        if isinstance(answer, Found):
            found.set_result(answer)
        else:
            found.set_exception(answer)

    def look() -> None:
        try:
            answer: Found | OSError = _look_up(host, port)
        except OSError as error:
            answer = error
        except UnicodeError:
            answer = socket.gaierror(socket.EAI_NONAME, "no valid host name")
        if not loop.is_closed():
            loop.call_soon_threadsafe(say, answer)

    threading.Thread(target=look, name="kvbus-look-up", daemon=True).start()
    return await found


def _look_up(host: str, port: int) -> Found:
    each = [
        (family, (address[0], port))
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if isinstance(address[0], str)
    ]
    # libzmq with ZMQ_IPV6 asks for IPv6, takes IPv4 where there is none, and tries the first address alone
    mapped = socket.getaddrinfo(host, port, family=socket.AF_INET6, type=socket.SOCK_STREAM, flags=socket.AI_V4MAPPED)[
        0
    ][4][0]
    wanted = str(mapped).removeprefix("::ffff:")
    first = next((one for one in each if one[1][0] == wanted), each[0])
    others = dict.fromkeys(one for one in each if one != first)
    return Found(first, tuple(others))
