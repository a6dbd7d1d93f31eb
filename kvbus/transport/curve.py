"""CURVE (ZeroMQ RFC 25 and 26): key files, and what they put on a socket.

A key file is what ``zmq.auth.create_certificates`` and czmq write (``public-key = "…"``, ``secret-key = "…"``), or the
bare key: 40 characters of Z85. An allow-list is a directory of such files with public keys, or one file with a key a
line; ``#`` begins a comment, and a name may follow the key.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

if TYPE_CHECKING:
    from kvbus.transport.sockets import Socket

KEY_BYTES: Final = 32
KEY_CHARS: Final = 40
MAX_FILE_BYTES: Final = 1024 * 1024
"""A key file is small; one larger than this is something else."""

PUBLIC: Final = "public-key"
SECRET: Final = "secret-key"
BARE: Final = "bare"

_OTHERS: Final = stat.S_IRWXO
_PAIR: Final = re.compile(r"""(public-key|secret-key)\s*=\s*["']?(\S*?)["']?""")
_METADATA: Final = re.compile(r"[\w./-]+\s*=\s.*")
_SECTIONS: Final = frozenset({"metadata", "curve"})


class KeyFileError(Exception):
    """A key file that cannot be used; the text says why and never what is in it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The keys of a source, an output or a client; all in Z85, ``clients`` as the 32 bytes of the wire.

    Attributes:
        public: kvbus's own.
        secret: kvbus's own.
        server: of the peer that is dialled; None where nothing is.
        clients: who may dial in.
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes | None = None
    clients: frozenset[bytes] = frozenset()

    def as_server(self, socket: Socket, domain: str) -> None:
        """Let in only whom the ZAP handler lets in. Without a handler nobody is: libzmq enforces the domain."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def as_client(self, socket: Socket) -> None:
        """Dial the one peer that has the server's secret key, and show it our own."""
        if self.server is None:
            raise KeyFileError("there is no public key of the peer that is dialled")
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def client_keys(secret_key_file: Path, server_key_file: Path) -> Curve:
    """A client's keys: its own secret key and the publisher's public key.

    Raises:
        KeyFileError: a file cannot be used, or others may read the secret key.
    """
    public, secret = read_secret(secret_key_file)
    return Curve(public, secret, read_public(server_key_file))


def generate() -> tuple[bytes, bytes]:
    """A new pair: public and secret key in Z85."""
    public, secret = zmq.curve_keypair()
    return public, secret


def certificate(public: bytes, secret: bytes | None = None) -> str:
    """The text of a key file, as ``zmq.auth.load_certificate`` and czmq read it."""
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def read_secret(path: Path) -> tuple[bytes, bytes]:
    """Public and secret key of a file that nobody but its owner and its group may read.

    The group may: Kubernetes gives a mounted Secret to the Pod's ``fsGroup``. Links are followed, as its mounts need.

    Raises:
        KeyFileError: it cannot be used.
    """
    keys = _single(_keys(_read(path, private=True)))
    secret = keys.get(SECRET) or keys.get(BARE)
    if secret is None:
        raise KeyFileError("holds no secret key")
    public = zmq.curve_public(secret)
    if keys.get(PUBLIC, public) != public:
        raise KeyFileError("its public key does not belong to its secret key")
    return public, secret


def read_public(path: Path) -> bytes:
    """The public key of a file.

    Raises:
        KeyFileError: it cannot be used.
    """
    keys = _single(_keys(_read(path)))
    public = keys.get(PUBLIC) or keys.get(BARE)
    if SECRET in keys:
        raise KeyFileError("holds a secret key; give the peer's public one")
    if public is None:
        raise KeyFileError("holds no public key")
    return public


def read_allowed(path: Path) -> frozenset[bytes]:
    """The public keys of an allow-list, as the 32 bytes of the wire.

    Raises:
        KeyFileError: the file, or one of the directory, cannot be used.
    """
    if not path.is_dir():
        return _allowed(path)
    try:
        # what begins with a dot is Kubernetes' own (..data), or an editor's
        files = sorted(each for each in path.iterdir() if not each.name.startswith(".") and not each.is_dir())
    except OSError as error:
        raise KeyFileError(f"cannot be read: {error.strerror or error}") from error
    allowed: frozenset[bytes] = frozenset()
    for each in files:
        try:
            allowed |= _allowed(each)
        except KeyFileError as error:
            raise KeyFileError(f"{each.name}: {error}") from error
    return allowed


def _allowed(path: Path) -> frozenset[bytes]:
    keys = _keys(_read(path))
    if any(kind == SECRET for kind, _ in keys):
        raise KeyFileError("holds a secret key; an allow-list holds public ones")
    return frozenset(z85.decode(key) for _, key in keys)


def _keys(text: str) -> list[tuple[str, bytes]]:
    """Every key of a file with its kind."""
    keys: list[tuple[str, bytes]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        pair = _PAIR.fullmatch(line)
        if pair is not None:
            if not _is_key(pair[2]):
                raise KeyFileError(f"its {pair[1]} is not {KEY_CHARS} characters of Z85")
            keys.append((pair[1], pair[2].encode()))
        elif _is_key(first := line.split()[0]):
            keys.append((BARE, first.encode()))
        elif line[0] != "#" and line not in _SECTIONS and not _METADATA.fullmatch(line):
            raise KeyFileError(f"a key is {KEY_CHARS} characters of Z85, as `kvbus keygen` writes it")
    return keys


def _single(keys: list[tuple[str, bytes]]) -> dict[str, bytes]:
    if len(dict(keys)) != len(keys):
        raise KeyFileError("holds more than one key")
    return dict(keys)


def _is_key(text: str) -> bool:
    try:
        return len(text) == KEY_CHARS and len(z85.decode(text.encode("ascii"))) == KEY_BYTES
    except (KeyError, ValueError, struct.error):
        return False


def _read(path: Path, *, private: bool = False) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is not waited for
    except OSError as error:
        raise KeyFileError(f"cannot be read: {error.strerror or error}") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise KeyFileError("is no file")
        if private and info.st_mode & _OTHERS:
            mode = stat.S_IMODE(info.st_mode)
            raise KeyFileError(f"others may read it (mode {mode:04o}): chmod o=, in Kubernetes defaultMode: 0440")
        if info.st_size > MAX_FILE_BYTES:
            raise KeyFileError("is too large for a key file")
        data = os.read(fd, MAX_FILE_BYTES)
    except OSError as error:
        raise KeyFileError(f"cannot be read: {error.strerror or error}") from error
    finally:
        os.close(fd)
    return data.decode("utf-8", "replace")
