"""Run etcd and kube-apiserver on loopback, with their own certificates and keys.

`.ci/cluster.sh` builds the programs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.cluster.api import Api
from tests.ports import free_ports
from tests.security.certificates import Authority

HOME_ENV: Final = "TEST_KUBERNETES"
MISSING: Final = (
    f"{HOME_ENV} names no API server: .ci/cluster.sh DIR builds one (Go, 45 minutes); make cluster does both"
)
PATIENCE: Final = 180.0
"""Maximum seconds for the start of etcd or the API server on a busy machine. An idle machine needs six."""

MOST: Final = 1500
"""Seconds after which a server ends, even if the tests were killed."""

ADMIN: Final = "not-a-secret"
HELM: Final = "not-a-secret-either"
TOKENS: Final = f'{ADMIN},admin,admin,system:masters\n{HELM},helm,helm,"system:masters,audited"\n'

AUDIT: Final = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: Metadata, userGroups: [system:serviceaccounts, audited]}
  - {level: None}
"""
"""Audit policy: record the requests of service accounts and of Helm."""


class Server:
    """A server program that a test can kill and start again. It ends by itself after :data:`MOST` seconds."""

    def __init__(self, said: Path, command: list[str], ready: Callable[[], bool]) -> None:
        self._said = said
        self._command = command
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server program, and wait until it answers."""
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                ["timeout", "--signal=KILL", str(MOST), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                process_group=0,
            )
        until = time.monotonic() + PATIENCE
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise AssertionError(f"{self._command[0]} does not come up: {self._said.read_text()[-4000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class ControlPlane:
    """One etcd, and the Kubernetes API servers that use it.

    Args:
        directory: directory of data, certificates and logs.
        home: directory of the programs.
    """

    def __init__(self, directory: Path, home: Path) -> None:
        self._directory = directory
        self._programs = home / "bin"
        self.crds = home / "crds"
        self.authority = Authority(directory)
        self._serving = self.authority.issue("kube-apiserver")
        self._accounts = self.authority.issue("service-accounts")
        (directory / "tokens.csv").write_text(TOKENS)
        (directory / "audit.yaml").write_text(AUDIT)
        client, peer = free_ports(2)
        self._etcd_url = f"http://127.0.0.1:{client}"
        self._etcd_api = Api(self._etcd_url)
        self._servers: list[Server] = []
        there = f"http://127.0.0.1:{peer}"
        self._start(
            "etcd",
            {
                "data-dir": directory / "etcd",
                "listen-client-urls": self._etcd_url,
                "advertise-client-urls": self._etcd_url,
                "listen-peer-urls": there,
                "initial-advertise-peer-urls": there,
                "initial-cluster": f"default={there}",
                "unsafe-no-fsync": "true",
            },
            lambda: self._etcd_api.answers("/health"),
        )

    def _start(self, program: str, flags: dict[str, Any], ready: Callable[[], bool]) -> Server:
        said = self._directory / f"{program}{len(self._servers)}.log"
        command = [str(self._programs / program), *(f"--{flag}={value}" for flag, value in flags.items())]
        server = Server(said, command, ready)
        self._servers.append(server)
        server.start()
        return server

    def api_server(self, **more: str) -> ApiServer:
        """Start one more API server, and return it. ``more`` are additional command-line flags."""
        (port,) = free_ports(1)
        audit = self._directory / f"audit{port}.log"
        api = Api(f"https://127.0.0.1:{port}", ADMIN, self.authority.certificate)
        flags = {
            "etcd-servers": self._etcd_url,
            "bind-address": "127.0.0.1",
            "advertise-address": "192.0.2.1",  # a valid address must not be loopback; no client uses it
            "secure-port": port,
            "tls-cert-file": self._serving.certificate,
            "tls-private-key-file": self._serving.key,
            "token-auth-file": self._directory / "tokens.csv",
            "authorization-mode": "RBAC",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": self._accounts.certificate,
            "service-account-signing-key-file": self._accounts.key,
            "service-cluster-ip-range": "10.0.0.0/16",
            "audit-policy-file": self._directory / "audit.yaml",
            "audit-log-path": audit,
            "profiling": "false",
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
        server = self._start("kube-apiserver", flags, lambda: api.answers("/readyz"))
        return ApiServer(server, api, audit)

    def compact(self) -> None:
        """Delete all old versions of objects from etcd, so that no watch can continue from one of them."""
        newest = self._etcd_api.post("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        self._etcd_api.post("/v3/kv/compaction", {"revision": newest, "physical": True})

    def close(self) -> None:
        for server in reversed(self._servers):
            server.kill()


class ApiServer:
    """A running API server, and the requests in its audit log."""

    def __init__(self, server: Server, api: Api, audit: Path) -> None:
        self._server = server
        self.api = api
        self._audit = audit

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def asked(self, user: str) -> list[dict[str, Any]]:
        """Return the requests of a user from the audit log: those that the server has answered or begun to answer."""
        events = [json.loads(line) for line in self._audit.read_text().splitlines() if line.endswith("}")]
        return [each for each in events if each["user"]["username"] == user]
