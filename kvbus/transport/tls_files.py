"""Read certificates and keys for TLS. An error names the file's key in the configuration, and never quotes the file."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

from kvbus.transport.curve import KeyFileError, read_file


class TlsFileError(KeyFileError):
    """A file cannot be used for TLS. ``key`` is the file's key in the configuration."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def read_text(key: str, path: Path, *, secret: bool = False) -> str:
    """Return the text of a certificate file or key file.

    Args:
        key: the file's key in the configuration.
        path: path of the file.
        secret: whether the file must be unreadable for users other than its owner and its group.

    Raises:
        TlsFileError: the file cannot be read, or other users may read a secret file.
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
    """Load kvbus's certificate and private key into a TLS context, which shows the certificate to peers.

    Args:
        context: the TLS context.
        key: the certificate's key in the configuration.
        certificate: path of the certificate file.
        private: path of the file with the private key.

    Raises:
        TlsFileError: a file is unusable, or the private key does not belong to the certificate.
    """
    try:
        context.load_cert_chain(certificate, private, _no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise TlsFileError(key, f"the certificate cannot be used with its private key ({why})") from error


def trust(context: ssl.SSLContext, key: str, authorities: str) -> None:
    """Make a TLS context trust certificate authorities.

    Args:
        context: the TLS context.
        key: the name of the configuration key that holds the authorities.
        authorities: the certificates of the authorities, in PEM.

    Raises:
        TlsFileError: the text contains no certificate.
    """
    try:
        context.load_verify_locations(cadata=authorities)
    except (ssl.SSLError, ValueError) as error:
        raise TlsFileError(key, "holds no certificate in PEM") from error


def _no_password() -> str:
    """Refuse an encrypted private key. Without this callback OpenSSL would ask for a password on the terminal."""
    raise ValueError("it is encrypted")
