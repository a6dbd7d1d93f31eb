"""TLS of the HTTP port: one context for each state of its files."""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvbus.transport.tls_files import read_text, show


@dataclass(frozen=True, slots=True)
class Tls:
    """What new connections are made with.

    Attributes:
        context: for the server's side.
        content: hash of the files that it was made of.
    """

    context: ssl.SSLContext = field(compare=False, repr=False)
    content: bytes = field(repr=False)


def read_tls(certificate: Path, key: Path, before: Tls | None = None) -> Tls:
    """Read the files, and return ``before`` where they hold what it was made of.

    kvbus never changes a context, so a bad file spoils none that is in use.

    Raises:
        TlsFileError: a file cannot be used; its ``key`` is that of the configuration.
    """
    texts = [read_text("http_tls_certificate_file", certificate), read_text("http_tls_key_file", key, secret=True)]
    content = hashlib.sha256("\0".join(texts).encode()).digest()
    if before is not None and before.content == content:
        return before
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    show(context, "http_tls_certificate_file", certificate, key)
    return Tls(context, content)
