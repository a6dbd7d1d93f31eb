"""The files for TLS. An error names the file's key in the configuration, and never quotes the file."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

from kvbus.transport.curve import KeyFileError, read_file


class TlsFileError(KeyFileError):
    """A file that TLS cannot use. ``key`` is its key in the configuration."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def read_text(key: str, path: Path, *, secret: bool = False) -> str:
    """Return a file's text. A secret file must not be readable by others.

    Raises:
        TlsFileError: the file cannot be read, or others may read the secret.
    """
    try:
        text, mode = read_file(path)
    except KeyFileError as error:
        raise TlsFileError(key, str(error)) from error
    if secret and mode & stat.S_IRWXO:
        wrong = f"other users can read it (mode {mode:04o}): chmod o=, in Kubernetes defaultMode: 0440"
        raise TlsFileError(key, wrong)
    return text


def show(context: ssl.SSLContext, key: str, certificate: Path, private: Path) -> None:
    """Load a certificate and its private key into a context; ``key`` is the certificate's key in the configuration.

    Raises:
        TlsFileError: a file is unusable, or the two do not match.
    """
    try:
        context.load_cert_chain(certificate, private, _no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise TlsFileError(key, f"cannot be used with its key ({why})") from error


def trust(context: ssl.SSLContext, key: str, authorities: str) -> None:
    """Let a context trust certificate authorities, in PEM; ``key`` is their key in the configuration.

    Raises:
        TlsFileError: the text holds no certificate.
    """
    try:
        context.load_verify_locations(cadata=authorities)
    except (ssl.SSLError, ValueError) as error:
        raise TlsFileError(key, "holds no certificate in PEM") from error


def _no_password() -> str:
    """Refuse an encrypted key. Without this callback OpenSSL would ask for a password on the terminal."""
    raise ValueError("it is encrypted")
