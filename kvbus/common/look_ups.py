"""Resolve host names without blocking the event loop, other work in threads, or the end of the process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

AT_ONCE: Final = 32
"""Maximum number of look-ups of one event loop at the same time. Further look-ups wait."""

T = TypeVar("T")

_rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def in_daemon_thread(look_up: Callable[[], T]) -> T:
    """Call a function that looks up a host name in a daemon thread, and return its result.

    A name server may need minutes to answer. The event loop's own threads would then be missing for other work, and the
    process would wait for them at its end.

    Raises:
        OSError: the function has raised it, or the host name is malformed.
    """
    loop = asyncio.get_running_loop()
    room = _rooms.setdefault(loop, asyncio.Semaphore(AT_ONCE))
    await room.acquire()
    found: asyncio.Future[T] = loop.create_future()

    def say(answer: T | None, error: OSError | None) -> None:
        room.release()
        if found.done():
            return
        if error is None:
            found.set_result(answer)  # type: ignore[arg-type]
        else:
            found.set_exception(error)

    def look() -> None:
        answer: T | None = None
        error: OSError | None = None
        try:
            answer = look_up()
        except OSError as failed:
            error = failed
        except UnicodeError:
            error = socket.gaierror(socket.EAI_NONAME, "no valid host name")
        if not loop.is_closed():
            loop.call_soon_threadsafe(say, answer, error)

    threading.Thread(target=look, name="kvbus-look-up", daemon=True).start()
    return await found


async def addresses_of(host: str, port: int) -> list[tuple[int, Any]]:
    """Return the TCP addresses of a host, as address families and arguments of ``socket.connect``.

    Raises:
        OSError: the host has no address.
    """

    def look_up(flags: int = 0) -> list[tuple[int, Any]]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, address) for family, _, _, _, address in found]

    try:
        return look_up(socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return await in_daemon_thread(look_up)
