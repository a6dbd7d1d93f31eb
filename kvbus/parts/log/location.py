"""The address of a log, the authentication to its servers, and the reasons for which a server refuses kvbus."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config, KafkaServers, KafkaTopic, LogAccess, NatsServers, OutputConfig, RedisKeys, RedisServer
from kvbus.config.logs import TYPES
from kvbus.parts.log.contract import UNREACHABLE, UnavailableError
from kvbus.transport.tls_files import TlsFileError, read_text, show, trust

POINTERS: Final = "-pointers"
"""Suffix of the name of the Kafka topic, or of the JetStream stream, that holds the pointers."""

MECHANISM: Final = "SCRAM-SHA-512"


@dataclass(frozen=True)
class Servers:
    """The servers of a log, and the settings of the connections to them.

    Attributes:
        servers: the servers' addresses ``host:port``, separated by commas.
        keys: the settings of TLS and authentication.
    """

    servers: str
    keys: LogAccess = field(default_factory=LogAccess)

    @property
    def addresses(self) -> Iterator[tuple[str, int]]:
        """The host and the port of each server, parsed from :attr:`servers`."""
        for server in self.servers.split(","):
            host, _, port = server.rpartition(":")
            yield host.strip("[]"), int(port)

    def tls(self) -> ssl.SSLContext | None:
        """Read the TLS files, and return the TLS context of a connection; None if TLS is not configured.

        Raises:
            TlsFileError: a file cannot be used.
        """
        keys = self.keys
        if keys.tls_ca_file is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        trust(context, "tls_ca_file", read_text("tls_ca_file", keys.tls_ca_file))
        if keys.tls_certificate_file is not None and keys.tls_key_file is not None:
            read_text("tls_certificate_file", keys.tls_certificate_file)
            read_text("tls_key_file", keys.tls_key_file, secret=True)
            show(context, "tls_certificate_file", keys.tls_certificate_file, keys.tls_key_file)
        return context

    def password(self) -> str | None:
        """Read the password file, and return the password; None if no password is configured.

        Raises:
            TlsFileError: the file cannot be used.
        """
        if self.keys.password_file is None:
            return None
        text = read_text("password_file", self.keys.password_file, secret=True)
        password = text.removesuffix("\n").removesuffix("\r")
        if not password:
            raise TlsFileError("password_file", "is empty")
        return password


@dataclass(frozen=True)
class KafkaLocation(Servers):
    """The servers of a log in Kafka. Besides TLS and authentication, ``keys`` has the name of the topic."""

    keys: KafkaServers = field(default_factory=KafkaServers)

    @property
    def topic(self) -> str:
        """Name of the Kafka topic that holds the records."""
        return self.keys.topic

    @property
    def pointers(self) -> str:
        """Name of the Kafka topic that holds the pointers."""
        return self.keys.topic + POINTERS

    def options(self) -> dict[str, Any]:
        """Read the TLS and password files, and return the options that aiokafka's clients need for them.

        Raises:
            TlsFileError: a file cannot be used.
        """
        context, password = self.tls(), self.password()
        if context is None:
            return {}
        if password is None:
            return {"security_protocol": "SSL", "ssl_context": context}
        return {
            "security_protocol": "SASL_SSL",
            "ssl_context": context,
            "sasl_mechanism": MECHANISM,
            "sasl_plain_username": self.keys.username,
            "sasl_plain_password": password,
        }


@dataclass(frozen=True)
class NatsLocation(Servers):
    """The servers of a log in NATS. Besides TLS and authentication, ``keys`` has the name of the JetStream stream."""

    keys: NatsServers = field(default_factory=NatsServers)

    @property
    def pointers(self) -> str:
        """Name of the JetStream stream that holds the pointers."""
        return self.keys.stream + POINTERS


@dataclass(frozen=True)
class RedisLocation(Servers):
    """The servers of a log in Redis or Valkey.

    Besides TLS and authentication, ``keys`` has the database and the prefix of the key names.
    """

    keys: RedisServer = field(default_factory=RedisServer)

    @property
    def retention(self) -> float:
        """Time in seconds for which a writer keeps records that are older than the newest state.

        New readers do not need them.
        """
        return (self.keys if isinstance(self.keys, RedisKeys) else RedisKeys()).retention


def location_of(output: OutputConfig) -> Any:
    """Return the servers of the log that an output writes, and the settings of the connections to them.

    The result is a :class:`KafkaLocation`, :class:`NatsLocation` or :class:`RedisLocation`.
    """
    return location_at(output.endpoint, output.log or KafkaTopic())


def location_at(endpoint: str, keys: LogAccess) -> Any:
    """Return where a log is: a :class:`KafkaLocation`, a :class:`NatsLocation` or a :class:`RedisLocation`.

    Args:
        endpoint: the endpoint of the first server.
        keys: the settings of the log. Their class decides which kind of log it is. They may list more servers.
    """
    more = keys.more_servers if isinstance(keys, (KafkaServers, NatsServers, RedisServer)) else ()
    servers = ",".join(each.removeprefix("tcp://") for each in (endpoint, *more))
    if isinstance(keys, NatsServers):
        return NatsLocation(servers, keys)
    if isinstance(keys, RedisServer):
        return RedisLocation(servers, keys)
    return KafkaLocation(servers, keys if isinstance(keys, KafkaServers) else KafkaTopic())


def check_files(config: Config) -> None:
    """Check that kvbus can read and use every TLS and password file of the configured logs.

    This covers the outputs that write a log and the sources that are read from one.

    Raises:
        ConfigError: kvbus cannot use a file. The error names all such files, and never quotes their content.
    """
    problems = []
    for at, keys in _accesses(config):
        servers = Servers("", keys)
        for read in (servers.tls, servers.password):
            try:
                read()
            except TlsFileError as error:
                problems.append(Problem(f"{at}.{error.key}", str(error), str(getattr(keys, error.key))))
    if problems:
        raise ConfigError(problems)


def _accesses(config: Config) -> Iterator[tuple[str, LogAccess]]:
    """Yield each section of the configuration that has settings for a log: its path, and the settings."""
    for number, source in enumerate(config.sources):
        for kind, settings in (source.discover or {}).items():
            if kind in TYPES:
                given = {name: settings[name] for name in LogAccess.model_fields}
                yield f"sources[{number}].discover.{kind}", LogAccess.model_validate(given)
    for number, output in enumerate(config.outputs):
        if output.log is not None:
            yield f"outputs[{number}].{output.type}", output.log


REQUEST: Final = 10.0
"""Timeout in seconds of a request to a log, including all its attempts."""

PAUSE: Final = 0.1
"""Time in seconds between two attempts of a request to a log."""

PROBE: Final = 1.0
"""Time in seconds for which :func:`probed` waits for a server's report that it refuses kvbus's TLS certificate."""

EXPIRED: Final = {9, 10}
WRONG_HOST: Final = {62, 63, 64}
"""OpenSSL's error numbers for a certificate that is valid for another host than the one to which kvbus connects.

:data:`EXPIRED` has the error numbers for a certificate that has expired or is not valid yet.
"""

Result = TypeVar("Result")


async def insisted(attempt: Callable[[float], Awaitable[Result]]) -> Result:
    """Call ``attempt`` again and again until it succeeds, and return its result.

    Give up after :data:`REQUEST` seconds. Also give up if the server says why it refuses the request, because another
    attempt would fail, too.

    Args:
        attempt: function that sends the request once. Its argument is the remaining time in seconds. It raises
            UnavailableError if the request fails.
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
    """Yield an error, the error that caused it, the cause of that error, and so on."""
    at: BaseException | None = error
    found = set()
    while at is not None and id(at) not in found:  # stop at an error that was raised again: it may be its own context
        found.add(id(at))
        yield at
        at = at.__cause__ if at.__suppress_context__ else at.__context__


def reason_of(
    error: BaseException, section: str, known: Callable[[BaseException], tuple[str, str] | None]
) -> UnavailableError | None:
    """Return an UnavailableError that says why an operation of a client library failed; None if kvbus knows no reason.

    The reason may be that of ``error`` itself, or of an error that caused it.

    Args:
        error: the error that the client library has raised.
        section: the name of the output's section in the configuration, for the text of the error.
        known: function that returns the reason for one error of this library, as a key of counters and as a sentence
            for the operator. It returns None for any other error.
    """
    for at in causes(error):
        if found := refusal(at, section):
            return found
        if named := known(at):
            reason, sentence = named
            return UnavailableError(sentence, reason)
    return None


def refusal(error: BaseException, section: str) -> UnavailableError | None:
    """Return an UnavailableError if ``error`` is about TLS or about a TLS or password file; otherwise None.

    ``section`` is the name of the section in ``outputs[]`` that names the files.
    """
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


async def probed(location: Servers, section: str, *, greets: bool = False) -> UnavailableError | None:
    """Connect to each server with TLS, and return why a server refuses kvbus's certificate; None if no server does.

    This asks again for a reason that was probably missed: a server reports the refusal only after the handshake, and a
    client that is writing at that moment may not get the report.

    Args:
        location: the servers.
        section: the name of the output's section in the configuration, for the text of the error.
        greets: whether a server sends a line without encryption before TLS begins.
    """
    for host, port in location.addresses if location.keys.tls_ca_file is not None else ():
        try:
            async with asyncio.timeout(PROBE):
                context = location.tls()
                reader, writer = await asyncio.open_connection(host, port, ssl=None if greets else context)
                try:
                    if greets and context is not None:
                        await reader.readline()
                        await writer.start_tls(context, server_hostname=host)
                    await reader.read(1)
                finally:
                    writer.transport.abort()  # a regular close would wait until the server ends TLS
        except (OSError, TimeoutError, TlsFileError) as error:
            found = refusal(error, section)
            if found is not None:
                return found
    return None


def _refused(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in EXPIRED:
        return "certificate_expired"
    return "certificate_wrong_host" if error.verify_code in WRONG_HOST else "certificate_foreign"
