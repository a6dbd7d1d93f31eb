"""Tests for the errors that kvbus reports about the TLS files of its HTTP server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvbus.http.credentials import read_tls
from kvbus.transport.tls_files import TlsFileError
from tests.security.certificates import Authority, Issued


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def issued(authority: Authority) -> Issued:
    return authority.issue("kvbus")


def test_unchanged_tls_files_give_the_same_tls_object(authority: Authority, issued: Issued) -> None:
    tls = read_tls(issued.certificate, issued.key)
    assert read_tls(issued.certificate, issued.key, tls) is tls
    other = authority.issue("kvbus")
    assert read_tls(other.certificate, other.key, tls) != tls


def test_an_unusable_tls_file_is_named_but_not_quoted(authority: Authority, issued: Issued, tmp_path: Path) -> None:
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
    for certificate, key, where, wrong in (
        (nothing, issued.key, "http_tls_certificate_file", "No such file"),
        (pipe, issued.key, "http_tls_certificate_file", "is not a regular file"),
        (junk, issued.key, "http_tls_certificate_file", "cannot be used with its private key"),
        (issued.certificate, other.key, "http_tls_certificate_file", "cannot be used with its private key"),
        (issued.certificate, nothing, "http_tls_key_file", "No such file"),
        (issued.certificate, readable, "http_tls_key_file", r"other users can read it \(mode 0644\)"),
        (issued.certificate, junk, "http_tls_certificate_file", "cannot be used with its private key"),
        (issued.certificate, locked, "http_tls_certificate_file", "it is encrypted"),
    ):
        with pytest.raises(TlsFileError, match=wrong) as caught:
            read_tls(certificate, key)
        assert caught.value.key == where
        assert "hunter2" not in str(caught.value)
    assert read_tls(issued.certificate, issued.key).content
