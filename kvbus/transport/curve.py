"""CURVE, ZeroMQ's public-key security (ZeroMQ RFC 25 and 26): read key files, and set the keys on libzmq sockets.

A key file has the format of ``zmq.auth.create_certificates`` and czmq (``public-key = "…"``, ``secret-key = "…"``), or
it contains only the key: 40 characters of Z85. An allow-list is a directory of files with public keys, or one file with
one public key in each line. In such a file ``#`` begins a comment, and a name and rights may follow each key
(:mod:`kvbus.transport.grants`).
"""

from __future__ import annotations

import os
import re
import stat
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from kvbus.transport.grants import Client, Clients, GrantError, parse

KEY_BYTES: Final = 32
KEY_CHARS: Final = 40
MAX_FILE_BYTES: Final = 1024 * 1024
"""Maximum size of a key file in bytes. kvbus refuses a larger file, because it cannot be a key file."""

PUBLIC: Final = "public-key"
SECRET: Final = "secret-key"
BARE: Final = "bare"

_OTHERS: Final = stat.S_IRWXO
_PAIR: Final = re.compile(r"""(public-key|secret-key)\s*=\s*["']?(\S*?)["']?""")
_METADATA: Final = re.compile(r"[\w./-]+\s*=\s.*")
_SECTIONS: Final = frozenset({"metadata", "curve"})


class KeyFileError(Exception):
    """kvbus cannot use a key file.

    The error's message names the reason, but never quotes the file, which may contain secrets.
    """


@dataclass(frozen=True, slots=True)
class Curve:
    """The CURVE keys of a source, an output or a client.

    Attributes:
        public: kvbus's own public key, in Z85 (40 bytes).
        secret: kvbus's own secret key, in Z85.
        server: public key of the peer that kvbus connects to, in Z85; None if kvbus binds.
        clients: the peers that may connect to kvbus, by public key (32 raw bytes).
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes | None = None
    clients: Clients = field(default_factory=dict)

    def as_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket authenticate with these keys, and accept only a peer that owns the secret key of ``server``.

        Raises:
            KeyFileError: ``server``, the public key of the peer, is None.
        """
        if self.server is None:
            raise KeyFileError("the peer's public key is missing")
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def client_keys(secret_key_file: Path, server_key_file: Path) -> Curve:
    """Read the keys of a client: the client's own key pair and the publisher's public key.

    Args:
        secret_key_file: file with the client's secret key.
        server_key_file: file with the publisher's public key.

    Raises:
        KeyFileError: kvbus cannot use a file, or other users may read the secret key.
    """
    public, secret = read_secret(secret_key_file)
    return Curve(public, secret, read_public(server_key_file))


def generate() -> tuple[bytes, bytes]:
    """Generate a CURVE key pair; return the public key and the secret key, in Z85."""
    public, secret = zmq.curve_keypair()
    return public, secret


def certificate(public: bytes, secret: bytes | None = None) -> str:
    """Return the text of a key file that ``zmq.auth.load_certificate`` and czmq can read.

    Args:
        public: the public key, in Z85.
        secret: the secret key, in Z85; None for a file with only the public key.
    """
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def read_secret(path: Path) -> tuple[bytes, bytes]:
    """Read a key pair from a file that only its owner and its group may read.

    The group may read the file, because Kubernetes gives a mounted Secret to the Pod's ``fsGroup``. The file may be a
    symbolic link, as in Kubernetes' mounts.

    Returns:
        The public key and the secret key, in Z85.

    Raises:
        KeyFileError: the file cannot be read, other users may read it, or it does not contain exactly one key pair.
    """
    text, mode = read_file(path)
    keys = _single(_keys(text))
    secret = keys.get(SECRET) or keys.get(BARE)
    if secret is None:
        raise KeyFileError("holds no secret key" + (", only a public key" if PUBLIC in keys else ""))
    _keep_private(mode)
    public = zmq.curve_public(secret)
    if keys.get(PUBLIC, public) != public:
        raise KeyFileError("its public key does not belong to its secret key")
    return public, secret


def read_public(path: Path) -> bytes:
    """Return the public key in a file, in Z85.

    Raises:
        KeyFileError: the file cannot be read, contains a secret key, or does not contain exactly one public key.
    """
    keys = _single(_keys(read_file(path)[0]))
    public = keys.get(PUBLIC) or keys.get(BARE)
    if SECRET in keys:
        raise KeyFileError("holds a secret key; give the peer's public key")
    if public is None:
        raise KeyFileError("holds no public key")
    return public


def read_allowed(path: Path) -> Clients:
    """Read an allow-list; return the peers that may connect, by public key (32 raw bytes).

    Args:
        path: a file with one public key in each line, or a directory of key files.

    Raises:
        KeyFileError: kvbus cannot use the file, or one of the files in the directory.
    """
    if not path.is_dir():
        return _allowed(path, "")
    try:
        # skip files whose name begins with a dot, because they belong to Kubernetes (..data) or to a text editor
        files = sorted(each for each in path.iterdir() if not each.name.startswith(".") and not each.is_dir())
    except OSError as error:
        raise KeyFileError(f"cannot be read: {error.strerror or error}") from error
    allowed: dict[bytes, Client] = {}
    for each in files:
        try:
            for key, client in _allowed(each, each.name.removesuffix(".key")).items():
                _add(allowed, key, client)
        except KeyFileError as error:
            raise KeyFileError(f"{each.name}: {error}") from error
    return allowed


def _allowed(path: Path, name: str) -> dict[bytes, Client]:
    """Read one file of an allow-list; return the peers by public key (32 raw bytes).

    Args:
        path: path of the file.
        name: the name for peers that have no name in the file.
    """
    allowed: dict[bytes, Client] = {}
    for number, kind, key, rest in _lines(read_file(path)[0]):
        if kind == SECRET:
            raise KeyFileError("holds a secret key; an allow-list holds only public keys")
        try:
            client = parse(rest)
            _add(allowed, z85.decode(key), client if client.name else replace(client, name=name))
        except (GrantError, KeyFileError) as error:
            raise KeyFileError(f"line {number}: {error}") from error
    return allowed


def _add(allowed: dict[bytes, Client], key: bytes, client: Client) -> None:
    if allowed.setdefault(key, client) != client:
        raise KeyFileError("this key is on the list already, with another name or other rights")


def _keys(text: str) -> list[tuple[str, bytes]]:
    """Return every key in the text of a key file, each with its kind (``PUBLIC``, ``SECRET`` or ``BARE``)."""
    return [(kind, key) for _, kind, key, _ in _lines(text)]


def _lines(text: str) -> list[tuple[int, str, bytes, str]]:
    """Return the lines of a key file that contain a key: line number, kind of key, key, and the text after the key.

    The kind is ``PUBLIC`` or ``SECRET``, or ``BARE`` for a line that does not name the kind.
    """
    keys: list[tuple[int, str, bytes, str]] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line:
            continue
        pair = _PAIR.fullmatch(line)
        if pair is not None:
            if not _is_key(pair[2]):
                raise KeyFileError(f"its {pair[1]} is not {KEY_CHARS} characters of Z85")
            keys.append((number, pair[1], pair[2].encode(), ""))
        elif _is_key(first := line.split()[0]):
            keys.append((number, BARE, first.encode(), line[KEY_CHARS:]))
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


def _keep_private(mode: int) -> None:
    if mode & _OTHERS:
        raise KeyFileError(f"other users can read it (mode {mode:04o}): chmod o=, in Kubernetes defaultMode: 0440")


def read_file(path: Path) -> tuple[str, int]:
    """Return the text of a key file or certificate file, and the file's permission bits.

    Raises:
        KeyFileError: the file cannot be read, is not a regular file, or exceeds :data:`MAX_FILE_BYTES`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: the path may be a named pipe
    except OSError as error:
        raise KeyFileError(f"cannot be read: {error.strerror or error}") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise KeyFileError("is not a regular file")
        if info.st_size > MAX_FILE_BYTES:
            raise KeyFileError("is too large for a key file")
        data = os.read(fd, MAX_FILE_BYTES)
    except OSError as error:
        raise KeyFileError(f"cannot be read: {error.strerror or error}") from error
    finally:
        os.close(fd)
    return data.decode("utf-8", "replace"), stat.S_IMODE(info.st_mode)
