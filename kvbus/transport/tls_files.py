"""Files that TLS is made of: read with their key of the configuration, so that an error names it and quotes nothing."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

from kvbus.transport.curve import KeyFileError, read_file


class TlsFileError(KeyFileError):
    """A file that TLS cannot use, with its key of the configuration."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def read_text(key: str, path: Path, *, secret: bool = False) -> str:
    """Return a file's text; a secret is refused that others may read.

    Raises:
        TlsFileError: it cannot be used.
    """
    try:
        text, mode = read_file(path)
    except KeyFileError as error:
        raise TlsFileError(key, str(error)) from error
    if secret and mode & stat.S_IRWXO:
        wrong = f"others may read it (mode {mode:04o}): chmod o=, in Kubernetes defaultMode: 0440"
        raise TlsFileError(key, wrong)
    return text


def show(context: ssl.SSLContext, key: str, certificate: Path, private: Path) -> None:
    """Let a context show this certificate; ``key`` names it in the configuration.

    Raises:
        TlsFileError: the two files cannot be used together.
    """
    try:
        context.load_cert_chain(certificate, private, _no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise TlsFileError(key, f"cannot be used with its key ({why})") from error


def trust(context: ssl.SSLContext, key: str, authorities: str) -> None:
    """Let a context trust these authorities; ``key`` names them in the configuration.

    Raises:
        TlsFileError: there is none among them.
    """
    try:
        context.load_verify_locations(cadata=authorities)
    except (ssl.SSLError, ValueError) as error:
        raise TlsFileError(key, "holds no certificate in PEM") from error


def _no_password() -> str:
    """Without this OpenSSL asks the terminal."""
    raise ValueError("it is encrypted")
