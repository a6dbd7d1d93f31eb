"""What is behind a port that does not greet as ZMTP does: its first bytes, or what it answers to TLS and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Final

from kvbus.transport.reach.names import Address

ANSWER_S: Final = 0.7
"""Seconds for an answer to one question."""

_SHOWN: Final = 32
_BEGINNINGS: Final = (
    (b"HTTP/", "an HTTP server"),
    (b"SSH-", "an SSH server"),
    (b"\x15\x03", "a TLS server"),
    (b"\x16\x03", "a TLS server"),
    (b"-ERR", "a Redis server"),
    (b"\x00\x00", "an HTTP/2 or gRPC server"),
)


def name_of(first: bytes) -> str:
    """Return what begins so."""
    for beginning, name in _BEGINNINGS:
        if first.startswith(beginning):
            return name
    text = first[:_SHOWN].decode("ascii", "replace")
    line = text.splitlines()[0] if text.strip() else ""
    return f"it says {line!r}" if line.isprintable() and line else f"it begins with {first[:_SHOWN].hex(' ')}"


async def identify(address: Address) -> str:
    """Ask a port that says nothing; empty if it says nothing to anybody."""
    for question in (_client_hello(), b"HEAD / HTTP/1.0\r\n\r\n"):
        answer = await _ask(address, question)
        name = name_of(answer) if answer else ""
        if name and not name.startswith("it "):
            return name
    return ""


async def _ask(address: Address, question: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    with socket.socket(address[0], socket.SOCK_STREAM) as asking, contextlib.suppress(OSError, TimeoutError):
        asking.setblocking(False)
        async with asyncio.timeout(ANSWER_S):
            await loop.sock_connect(asking, address[1])
            await loop.sock_sendall(asking, question)
            return await loop.sock_recv(asking, 64)
    return b""


def _client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()
