"""Create certificate authorities and TLS certificates with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*args: object) -> None:
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, timeout=60)


class Issued:
    """The paths of a certificate's file and of its private key's file."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate, self.key = certificate, key


class Authority:
    """A certificate authority of the tests, which signs TLS certificates."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self.certificate, self._key = directory / f"{name}.crt", directory / f"{name}.key"
        _openssl("req", "-x509", *_KEY, "-keyout", self._key, "-out", self.certificate, "-subj", f"/CN={name}")

    def issue(
        self, name: str, *, days: int = 1, host: str = "127.0.0.1", usage: str = "clientAuth,serverAuth"
    ) -> Issued:
        """Create a certificate and its private key. If it is valid for -1 day, it has already expired."""
        made = Issued(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        request, extensions = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName=IP:{host},DNS:localhost\nextendedKeyUsage={usage}\n")
        _openssl("req", *_KEY, "-keyout", made.key, "-out", request, "-subj", f"/CN={name}")
        signed = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, *signed, "-days", days, "-out", made.certificate)
        made.key.chmod(0o600)
        return made
