"""Create sockets for endpoints, and format the addresses of peers as text."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from dataclasses import dataclass
from typing import Final

from kvbus.common.errors import BindError
from kvbus.transport.zmtp import tcp

BACKLOG: Final = 1_024
"""Maximum number of connections that the kernel queues for accept. After a restart of kvbus all routers connect at
once.
"""

_SIOCGIFADDR: Final = 0x8915
_IFREQ: Final = struct.Struct("16s24s")
_IPC: Final = "ipc://"
_TCP: Final = "tcp://"


def split_tcp(endpoint: str) -> tuple[str, int]:
    """Split an endpoint ``tcp://host:port`` into host and port.

    Raises:
        ValueError: the endpoint has another form, or the port is above 65535.
    """
    host, colon, port = endpoint.removeprefix(_TCP).rpartition(":")
    if not endpoint.startswith(_TCP) or not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("must be tcp://host:port or ipc://path")
    return host.strip("[]"), int(port)


def ipc_address(endpoint: str) -> str | None:
    """Return the Unix socket address of an ``ipc://`` endpoint; None for another endpoint.

    ``ipc://@name`` means an address in Linux's abstract namespace, without a file.
    """
    if not endpoint.startswith(_IPC):
        return None
    path = endpoint.removeprefix(_IPC)
    return "\0" + path[1:] if path.startswith("@") else path


@dataclass(slots=True)
class Bound:
    """A listening socket and its endpoint.

    Attributes:
        socket: the listening socket.
        endpoint: the endpoint, with the real port.
        file: the path of a Unix socket, and the device and inode of its file; None for a socket without a file.
    """

    socket: socket.socket
    endpoint: str
    file: tuple[str, tuple[int, int]] | None = None

    def close(self) -> None:
        """Stop listening. Delete the file of a Unix socket, unless another process has replaced the file."""
        self.socket.close()
        if self.file is not None:
            path, identity = self.file
            with contextlib.suppress(OSError):
                if _file_identity(path) == identity:
                    os.unlink(path)  # noqa: PTH108 - a path as the endpoint has it


def bind(endpoint: str) -> Bound:
    """Bind an endpoint, listen, and return the listening socket.

    Raises:
        BindError: the endpoint is in use, malformed, or not an address of this machine.
    """
    try:
        path = ipc_address(endpoint)
        return _bind_tcp(endpoint) if path is None else _bind_ipc(endpoint, path)
    except ValueError as error:
        raise BindError(endpoint, str(error)) from error
    except OSError as error:
        raise BindError(endpoint, os.strerror(error.errno) if error.errno else str(error)) from error


def _bind_tcp(endpoint: str) -> Bound:
    host, port = split_tcp(endpoint)
    if host == "*":
        try:
            listening = _listen(socket.AF_INET6, ("::", port))
        except OSError as error:
            if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                raise
            listening = _listen(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 - asked for by the user
    else:
        family, address = _local(host, port)
        listening = _listen(family, address)
    return Bound(listening, f"{endpoint.rpartition(':')[0]}:{listening.getsockname()[1]}")


def _local(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    """Return the family and address of a numeric host or a network interface. Like libzmq, look up no host name.

    Unlike in libzmq, ``localhost`` means the loopback address and not the name of an interface.
    """
    if host == "localhost":
        host = "127.0.0.1"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return socket.AF_INET, (_interface(host), port)
    return found[0][0], found[0][4]


def _interface(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        OSError: the machine has no interface with this name and an IPv4 address (ENODEV).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, _IFREQ.pack(name.encode(), b""))
    except (OSError, struct.error, UnicodeError):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV)) from None
    return socket.inet_ntoa(answer[20:24])


def _listen(family: int, address: tuple[object, ...] | str) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(address)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    listening.setblocking(False)
    return listening


def _bind_ipc(endpoint: str, path: str) -> Bound:
    abstract = path.startswith("\0")
    if not abstract:
        with contextlib.suppress(FileNotFoundError):
            # as libzmq does, delete the socket file that a killed process has left, but never a file of another kind
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)  # noqa: PTH108 - a path as the endpoint has it
    listening = _listen(socket.AF_UNIX, path)
    return Bound(listening, endpoint, None if abstract else (path, _file_identity(path)))


def _file_identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def peer_address(connected: socket.socket) -> str:
    """Return the peer's address as text: ``10.0.0.7:40132``, ``[fd00::7]:40132``, or ``unix`` for a Unix socket.

    The result is ``gone`` if the connection has ended.
    """
    if connected.family == socket.AF_UNIX:
        return "unix"
    try:
        name, port = connected.getpeername()[:2]
    except OSError:
        return "gone"
    host = name.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str | None:
    """Return the host in a peer's address from :func:`peer_address`, without brackets; None if it has none."""
    host, colon, _ = address.rpartition(":")
    return host.strip("[]") if colon else None


def prepare(connected: socket.socket) -> None:
    """Make a new connection non-blocking, and set its TCP options."""
    connected.setblocking(False)
    if connected.family != socket.AF_UNIX:
        tcp.set_options(connected)
