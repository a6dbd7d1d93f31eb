"""Parse endpoints (``tcp://host:port`` and ``ipc://path``) and hosts, and derive the endpoint of the n-th stream."""

from __future__ import annotations

import functools
import ipaddress
import re
from dataclasses import dataclass
from typing import Final

MAX_PORT: Final = 65535
_MAX_IPC_PATH: Final = 107  # in bytes; Linux's sun_path has room for 108 bytes, including a final zero byte
_WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - recognised, not bound
_TCP: Final = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/@\[\]]+):(?P<port>[0-9]{1,5})")
_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/@\[\]]+):(?P<port>[0-9]{1,5})")
_HOST: Final = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]*)?")
_RANK: Final = "{rank}"
_BROKERS: Final = {
    "kafka": "type: kafka, endpoint: tcp://{}, kafka: {{topic: kvbus}}",
    "nats": "type: nats, endpoint: tcp://{}, nats: {{stream: kvbus}}",
    "redis": "type: redis, endpoint: tcp://{}, redis: {{prefix: kvbus}}",
}


@dataclass(frozen=True, slots=True)
class Address:
    """An address to bind or to connect to: a TCP host and port, or the path of a local socket.

    Attributes:
        host: the host, or the path.
        port: the port; 0 for a local socket.
    """

    host: str
    port: int

    @property
    def is_ipc(self) -> bool:
        """Whether this is the path of a local socket."""
        return self.port == 0

    @property
    def is_wildcard(self) -> bool:
        """Whether the host is a wildcard, which stands for every interface of this machine."""
        return not self.is_ipc and self.host in _WILDCARDS

    @property
    def is_loopback(self) -> bool:
        """Whether only processes on this machine (or in this pod) can reach the address."""
        return self.is_ipc or is_loopback(self.host)


@functools.lru_cache(maxsize=256)  # cached, because the HTTP port calls this three times for each request
def is_loopback(host: str) -> bool:
    """Return whether only processes on this machine (or in this pod) can reach a host.

    An IPv4 address that is mapped to IPv6 is treated as the IPv4 address.

    Args:
        host: a host name or an address, without brackets.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _host(text: str) -> str:
    return "127.0.0.1" if text == "localhost" else text.strip("[]")


def parse_endpoint(endpoint: str) -> Address:
    """Parse an endpoint such as ``tcp://127.0.0.1:5557`` or ``ipc:///run/kv``.

    Raises:
        ValueError: the endpoint is neither ``tcp://host:port`` nor ``ipc://path``. The text explains the problem.
    """
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path or path in {"*", "@"} or any(c.isspace() or c == "\0" for c in path):
            raise ValueError("an ipc endpoint needs a path without spaces")
        if set(re.findall(r"\{[^}]*\}?|\}", path)) - {_RANK}:
            raise ValueError("in an ipc endpoint, {rank} is the only allowed placeholder")
        if len(path.encode()) > _MAX_IPC_PATH:
            raise ValueError(f"an ipc path has at most {_MAX_IPC_PATH} bytes")
        return Address(path, 0)
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise ValueError(f"must be tcp://host:port or ipc://path{_hint(endpoint, 'tcp://')}")
    return Address(_host(match["host"]), _port(match["port"]))


def _hint(text: str, scheme: str) -> str:
    """Return advice for correcting a malformed address; empty if kvbus cannot guess what the user meant.

    Args:
        text: the malformed address.
        scheme: the scheme that the address should have, such as ``tcp://``; empty for an address without a scheme.
    """
    name, separator, rest = text.rpartition("://")
    host, _, port = rest.rpartition(":")
    if name in _BROKERS:
        return f"; a broker has these keys: {_BROKERS[name].format(rest)}"
    if f"{name}{separator}" not in {scheme, ""}:
        return ""
    if rest.isascii() and rest.isdigit():
        return f"; {rest} is a port without a host: {scheme}127.0.0.1:{rest} is on this machine"
    if host.count(":") > 1 and "[" not in rest:
        return f"; an IPv6 address needs brackets: {scheme}[{host}]:{port}"
    if _ADDRESS.fullmatch(rest) and not separator:
        return f"; write {scheme}{rest}"
    return "" if ":" in rest else "; the port is missing"


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= MAX_PORT:
        # port 0 (the system picks a port) is useless, because routers must know the port in advance
        raise ValueError(f"the port must be between 1 and {MAX_PORT}")
    return port


def parse_address(address: str) -> tuple[str, int]:
    """Parse ``host:port`` and return both. Port 0 means that the system picks a port.

    Raises:
        ValueError: the address is not ``host:port``.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"must be host:port{_hint(address, '')}")
    port = int(match["port"])
    if port > MAX_PORT:
        raise ValueError(f"the port must be between 0 and {MAX_PORT}")
    host = match["host"].strip("[]")
    return ("0.0.0.0" if host == "*" else host), port  # noqa: S104 - asked for by the user


def host_name(authority: str) -> str | None:
    """Return the host in a Host header, without port and brackets, in a form that can be compared.

    Returns:
        The host name or address; None if the header has no valid host.
    """
    match = _HOST.fullmatch(authority.lower())
    if match is None:
        return None
    if not match["name"].startswith("["):
        return match["name"].removesuffix(".") or None  # "localhost." is the absolute form of "localhost"
    try:
        return str(ipaddress.IPv6Address(match["name"][1:-1]))
    except ValueError:
        return None


def endpoint_offset(endpoint: str, n: int) -> str:
    """Return the endpoint of the n-th stream. The first stream has the number 0.

    With ``tcp://`` the port is port + n. With ``ipc://`` a ``{rank}`` in the path is replaced by n. If the path has no
    ``{rank}``, stream 0 has the unchanged path, and every other stream has the path with ``-n`` at its end:
    ``ipc:///run/kv``, ``ipc:///run/kv-1``, and so on.

    Raises:
        ValueError: the endpoint is malformed, or the port would be above 65535.
    """
    if n < 0:
        raise ValueError(f"streams are counted from 0, but the number is {n}")
    address = parse_endpoint(endpoint)
    if address.is_ipc:
        if _RANK in endpoint:
            return endpoint.replace(_RANK, str(n))
        return endpoint if n == 0 else f"{endpoint}-{n}"
    if address.port + n > MAX_PORT:
        raise ValueError(f"port {address.port} + {n} is above {MAX_PORT}")
    return f"{endpoint.rpartition(':')[0]}:{address.port + n}"
