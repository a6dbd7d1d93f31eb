"""TLS of the HTTP port: one context for each state of its files, and the name on a client's certificate."""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbus.transport.tls_files import read_text, show, trust

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
        TlsFileError: a file cannot be used; its ``key`` is that of the configuration.
    """
    texts = [read_text("http_tls_certificate_file", certificate), read_text("http_tls_key_file", key, secret=True)]
    trusted = "" if authorities is None else read_text("http_client_ca_file", authorities)
    content = hashlib.sha256("\0".join([*texts, trusted]).encode()).digest()
    if before is not None and before.content == content:
        return before
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    show(context, "http_tls_certificate_file", certificate, key)
    if authorities is not None:
        trust(context, "http_client_ca_file", trusted)
        context.verify_mode = ssl.CERT_OPTIONAL  # probes and tokens come without one
    return Tls(context, content, hashlib.sha256(trusted.encode()).digest() if trusted else b"")


def name_of(certificate: dict[str, Any]) -> str:
    """Return the name on a verified certificate: its subject's CN, else the first URI or DNS name."""
    subject = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    others = [value for kind, value in certificate.get("subjectAltName", ()) if kind in {"URI", "DNS"}]
    name = next(iter([*subject, *others]), "") or "unnamed"
    return "".join(char if char.isprintable() else "?" for char in name[:_MAX_NAME])


def expiry_of(certificate: dict[str, Any]) -> float:
    """Return the time of day, in seconds, until which a certificate holds."""
    return float(ssl.cert_time_to_seconds(certificate["notAfter"]))
