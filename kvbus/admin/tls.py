"""TLS of the HTTP port: one context for each state of its files, and the name on a client's certificate."""

from __future__ import annotations

import hashlib
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbus.transport.curve import KeyFileError, read_file

_MAX_NAME: Final = 128


@dataclass(frozen=True, slots=True)
class Tls:
    """What new connections are made with.

    Attributes:
        context: for the server's side.
        content: hash of the files that it was made of.
        authorities: hash of the client authorities among them; empty without any.
    """

    context: ssl.SSLContext = field(compare=False, repr=False)
    content: bytes = field(repr=False)
    authorities: bytes = field(repr=False)


def read_tls(certificate: Path, key: Path, authorities: Path | None, before: Tls | None = None) -> Tls:
    """Read the files, and return ``before`` where they hold what it was made of.

    A context is never changed, so a bad file spoils none that is in use, and an authority that is gone is gone.

    Raises:
        KeyFileError: a file cannot be used; the text names the key of the configuration.
    """
    texts = [_text("http_tls_certificate_file", certificate), _text("http_tls_key_file", key, secret=True)]
    trusted = "" if authorities is None else _text("http_client_ca_file", authorities)
    content = hashlib.sha256("\0".join([*texts, trusted]).encode()).digest()
    if before is not None and before.content == content:
        return before
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise TlsFileError("http_tls_certificate_file", f"cannot be used with its key ({why})") from error
    if authorities is not None:
        try:
            context.load_verify_locations(cadata=trusted)
        except (ssl.SSLError, ValueError) as error:
            raise TlsFileError("http_client_ca_file", "holds no certificate in PEM") from error
        context.verify_mode = ssl.CERT_OPTIONAL  # probes and tokens come without one
    return Tls(context, content, hashlib.sha256(trusted.encode()).digest() if trusted else b"")


class TlsFileError(KeyFileError):
    """A file that TLS cannot use, with its key of the configuration."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def name_of(certificate: dict[str, Any]) -> str:
    """Return the name on a verified certificate: its subject's CN, else the first URI or DNS name."""
    subject = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    others = [value for kind, value in certificate.get("subjectAltName", ()) if kind in {"URI", "DNS"}]
    name = next(iter([*subject, *others]), "") or "unnamed"
    return "".join(char if char.isprintable() else "?" for char in name[:_MAX_NAME])


def expiry_of(certificate: dict[str, Any]) -> float:
    """Return the time of day, in seconds, until which a certificate holds."""
    return float(ssl.cert_time_to_seconds(certificate["notAfter"]))


def _text(key: str, path: Path, *, secret: bool = False) -> str:
    try:
        text, mode = read_file(path)
    except KeyFileError as error:
        raise TlsFileError(key, str(error)) from error
    if secret and mode & stat.S_IRWXO:
        wrong = f"others may read it (mode {mode:04o}): chmod o=, in Kubernetes defaultMode: 0440"
        raise TlsFileError(key, wrong)
    return text


def _no_password() -> str:
    """Without this OpenSSL asks the terminal."""
    raise ValueError("it is encrypted")
