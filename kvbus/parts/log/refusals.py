"""How long a server of a log is asked, and why it does not take kvbus as far as files and certificates say."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

from kvbus.parts.log.contract import UNREACHABLE, UnavailableError
from kvbus.parts.log.place import Servers
from kvbus.transport.tls_files import TlsFileError

REQUEST: Final = 10.0
"""Seconds that the server has for a request, all attempts together."""

PAUSE: Final = 0.1
"""Seconds between two attempts."""

PROBE: Final = 1.0
"""Seconds in which a server that refuses a certificate says so."""

EXPIRED: Final = {9, 10}
WRONG_HOST: Final = {62, 63, 64}
"""OpenSSL's numbers for what is wrong with a certificate."""

Result = TypeVar("Result")


async def insisted(attempt: Callable[[float], Awaitable[Result]]) -> Result:
    """Try again until :data:`REQUEST` is over, unless the server says why not.

    Args:
        attempt: takes the seconds that are left, and raises an UnavailableError if nothing came of it.
    """
    time = asyncio.get_running_loop().time
    until = time() + REQUEST
    while True:
        try:
            return await attempt(until - time())
        except UnavailableError as error:
            if error.reason != UNREACHABLE or time() + PAUSE >= until:
                raise
        await asyncio.sleep(PAUSE)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came from."""
    at: BaseException | None = error
    found = set()
    while at is not None and id(at) not in found:  # one that is raised again may be its own context
        found.add(id(at))
        yield at
        at = at.__cause__ if at.__suppress_context__ else at.__context__


def refusal(error: BaseException, section: str) -> UnavailableError | None:
    """The reason that one error has of TLS, or of a file of ``outputs[].SECTION``; None: it is about something else."""
    if isinstance(error, TlsFileError):
        return UnavailableError(f"{section}.{error.key} {error}", "key_file")
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the server's certificate is refused: {error.verify_message}"
        return UnavailableError(text, _refused(error))
    if isinstance(error, ssl.SSLError):
        why = error.reason or str(error)
        if "ALERT" in why:
            text = f"the server refuses kvbus's certificate: expired, of a foreign authority, or missing ({why})"
            return UnavailableError(text, "client_certificate_refused")
        return UnavailableError(f"no TLS: {why}", "tls_failed")
    return None


async def probed(place: Servers, section: str, *, greets: bool = False) -> UnavailableError | None:
    """What a server has against kvbus's certificate: it says so behind the handshake, and who writes may miss it.

    Args:
        place: where the servers are.
        section: of the output.
        greets: a server says a line in clear before TLS.
    """
    for host, port in place.addresses if place.keys.tls_ca_file is not None else ():
        try:
            async with asyncio.timeout(PROBE):
                context = place.tls()
                reader, writer = await asyncio.open_connection(host, port, ssl=None if greets else context)
                try:
                    if greets and context is not None:
                        await reader.readline()
                        await writer.start_tls(context, server_hostname=host)
                    await reader.read(1)
                finally:
                    writer.transport.abort()  # a close waits for the server's farewell
        except (OSError, TimeoutError, TlsFileError) as error:
            found = refusal(error, section)
            if found is not None:
                return found
    return None


def _refused(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in EXPIRED:
        return "certificate_expired"
    return "certificate_wrong_host" if error.verify_code in WRONG_HOST else "certificate_foreign"
