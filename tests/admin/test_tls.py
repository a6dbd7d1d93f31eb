"""The files of TLS: every mistake in them, and what a certificate calls its owner."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvbus.admin.tls import expiry_of, name_of, read_tls
from kvbus.transport.tls_files import TlsFileError
from tests.security.certificates import Authority, Issued


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def issued(authority: Authority) -> Issued:
    return authority.issue("kvbus")


def test_the_same_files_are_the_same(authority: Authority, issued: Issued) -> None:
    tls = read_tls(issued.certificate, issued.key, authority.certificate)
    assert read_tls(issued.certificate, issued.key, authority.certificate, tls) is tls
    without = read_tls(issued.certificate, issued.key, None, tls)
    assert without != tls
    assert without.authorities == b""
    other = authority.issue("kvbus")
    renewed = read_tls(other.certificate, other.key, authority.certificate, tls)
    assert renewed != tls
    assert renewed.authorities == tls.authorities


def test_what_cannot_be_used_is_named_and_not_quoted(authority: Authority, issued: Issued, tmp_path: Path) -> None:
    other, nothing, junk = authority.issue("other"), tmp_path / "nothing", tmp_path / "junk"
    junk.write_text("hunter2")
    junk.chmod(0o600)
    readable = tmp_path / "readable"
    readable.write_bytes(issued.key.read_bytes())
    readable.chmod(0o644)
    locked = tmp_path / "locked"
    encrypt = ["openssl", "pkcs8", "-topk8", "-in", str(issued.key), "-out", str(locked), "-passout", "pass:hunter2"]
    subprocess.run(encrypt, check=True, capture_output=True, timeout=60)
    locked.chmod(0o600)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ca = authority.certificate
    for certificate, key, clients, where, wrong in (
        (nothing, issued.key, None, "http_tls_certificate_file", "No such file"),
        (pipe, issued.key, None, "http_tls_certificate_file", "is not a regular file"),
        (junk, issued.key, None, "http_tls_certificate_file", "cannot be used with its key"),
        (issued.certificate, other.key, None, "http_tls_certificate_file", "cannot be used with its key"),
        (issued.certificate, nothing, None, "http_tls_key_file", "No such file"),
        (issued.certificate, readable, None, "http_tls_key_file", r"others may read it \(mode 0644\)"),
        (issued.certificate, junk, None, "http_tls_certificate_file", "cannot be used with its key"),
        (issued.certificate, locked, None, "http_tls_certificate_file", "it is encrypted"),
        (issued.certificate, issued.key, junk, "http_client_ca_file", "holds no certificate in PEM"),
        (issued.certificate, issued.key, nothing, "http_client_ca_file", "No such file"),
    ):
        with pytest.raises(TlsFileError, match=wrong) as caught:
            read_tls(certificate, key, clients)
        assert caught.value.key == where
        assert "hunter2" not in str(caught.value)
    assert read_tls(issued.certificate, issued.key, ca).authorities


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        ({"subject": ((("organizationName", "o"),), (("commonName", "router-a"),))}, "router-a"),
        ({"subject": ((("commonName", "a"),),), "subjectAltName": (("DNS", "b"),)}, "a"),
        (
            {"subjectAltName": (("IP Address", "10.1.2.3"), ("URI", "spiffe://x/router"), ("DNS", "b"))},
            "spiffe://x/router",
        ),
        ({"subject": ()}, "unnamed"),
        ({"subject": ((("commonName", "a\nb\x1b[31m"),),)}, "a?b?[31m"),
        ({"subject": ((("commonName", "a" * 1000),),)}, "a" * 128),
    ],
)
def test_the_name_on_a_certificate(certificate: dict[str, object], name: str) -> None:
    assert name_of(certificate) == name


def test_the_end_of_a_certificate() -> None:
    assert expiry_of({"notAfter": "Jan  1 00:00:10 1970 GMT"}) == 10
