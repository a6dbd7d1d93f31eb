"""Tests for the access rights of kvbus's HTTP server: which kind of caller may read which endpoint with which
method.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvbus.config.endpoints import is_loopback
from kvbus.daemon.serve import Reloader
from kvbus.http import access
from kvbus.http.credentials import line_of, new_token
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.long import LONG
from tests.security.certificates import Authority, Issued
from tests.typed import there

TOKEN_ID, BLOCK = 71_234_567, 8_812_345_678
REMOTE = "127.0.0.66"
"""A loopback address that the tests treat as the address of another machine."""

RIGHT, STATUS, REVOKED, WRONG = (new_token() for _ in range(4))
STATIC = ("/", "/page.css", "/page.js", "/livez", "/readyz")
STATES = ("/metrics", "/sources", "/routers", "/findings", "/overview", "/history?source=engine", "/events")
CONTENT = ("/blocks", "/events?output=routers&after=ID-0-0:0")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")


@pytest.fixture(autouse=True)
def another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "is_loopback", lambda host: host != REMOTE and is_loopback(host))


class Pki:
    """Two certificates: kvbus's own, and one that a client presents although the server does not request it."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.server = self.authority.issue("kvbus")
        self.client = self.authority.issue("router-c")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


class Answer(NamedTuple):
    """An HTTP answer. Status 0 means that the server closed the connection without an answer."""

    status: int
    body: str


class Callers:
    """A running bus with one block, to which a test sends raw HTTP requests from various addresses.

    The requests may have a client certificate, headers with a token, or nothing that names the caller.
    """

    def __init__(self, bus: Bus, pki: Pki | None) -> None:
        self.bus, self._pki = bus, pki
        self.address = there(bus.daemon.http_address)

    def connect(self, local: str, certificate: Issued | None = None, *, plain: bool = False) -> socket.socket:
        connection = socket.create_connection(self.address, 30, (local, 0))
        if self._pki is None or plain:
            return connection
        context = ssl.create_default_context(cafile=self._pki.authority.certificate)
        if certificate is not None:
            context.load_cert_chain(certificate.certificate, certificate.key)
        return context.wrap_socket(connection, server_hostname="127.0.0.1")

    def ask(
        self,
        method: str,
        path: str,
        headers: str = "",
        *,
        local: str = REMOTE,
        certificate: Issued | None = None,
        plain: bool = False,
    ) -> Answer:
        process = self.bus.daemon.admin.timeline.process
        host = "" if "Host: " in headers else "Host: localhost\r\n"
        lines = headers.replace("|", "\r\n")
        text = f"{method} {path.replace('ID', process)} HTTP/1.1\r\n{host}{lines}\r\n"
        try:
            with self.connect(local, certificate, plain=plain) as connection:
                connection.sendall(text.encode("utf-8", "surrogateescape"))
                answer = http.client.HTTPResponse(connection, method=method)
                answer.begin()
                if answer.headers["Content-Type"] != "text/event-stream":
                    return Answer(answer.status, answer.read().decode())
                events = b""
                while (b"BlockStored" if "output=" in path else b"event: start") not in events:
                    events += answer.readline()
                return Answer(answer.status, events.decode())
        except (ssl.SSLError, ConnectionError, http.client.BadStatusLine):
            return Answer(0, "")


@contextlib.asynccontextmanager
async def callers(tmp_path: Path, pki: Pki | None = None, **settings: Any) -> AsyncIterator[Callers]:
    tokens = tmp_path / "tokens"
    lines = [line_of("router-a", RIGHT, content=True), line_of("prometheus", STATUS, content=False)]
    tokens.write_text("\n".join(["# who may read", "", *lines]))
    settings = {"http_tokens_file": tokens, "key_reload_interval": 0.02, **settings}
    if pki is not None:
        settings["http_tls_certificate_file"] = pki.server.certificate
        settings["http_tls_key_file"] = pki.server.key
    async with (
        running_bus(**settings) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        engine.publish(batch(store([BLOCK], tokens=[TOKEN_ID] * 16)))
        await eventually(lambda: bus.caught_up(0), "one block")
        reloader = Reloader(bus.daemon, lambda: bus.daemon.config)
        reloader.watch()
        try:
            yield Callers(bus, pki)
        finally:
            reloader.close()


class Caller(NamedTuple):
    """A kind of HTTP caller, and what it may read.

    It may read everything including token ids, the status without token ids, or nothing, or its connection is refused.
    """

    name: str
    may: str
    headers: str = ""
    local: str = REMOTE
    tls: bool = False
    certificate: bool = False
    plain: bool = False


BEARER = f"Authorization: Bearer {RIGHT}|"
WHO = [
    Caller("nobody, remote", "nothing"),
    Caller("loopback", "content", local="127.0.0.1"),
    Caller("loopback, with a wrong token", "content", f"Authorization: Bearer {WRONG}|", "127.0.0.1"),
    Caller("loopback by a proxy", "nothing", "X-Forwarded-For: 127.0.0.1|", "127.0.0.1"),
    Caller("a page of another site", "nothing", "Origin: http://evil.example|Sec-Fetch-Site: cross-site|", "127.0.0.1"),
    Caller("a name that leads to loopback", "nothing", "Host: evil.example|", "127.0.0.1"),
    Caller("a wrong token", "nothing", f"Authorization: Bearer {WRONG}|"),
    Caller("half a token", "nothing", f"Authorization: Bearer {RIGHT[:-1]}|"),
    Caller("no token", "nothing", "Authorization: Bearer |"),
    Caller("odd bytes", "nothing", "Authorization: Bearer \udcff\udcfe|"),
    Caller("a huge token", "nothing", f"Authorization: Bearer {'x' * 7000}|"),
    Caller("a hash in place of its token", "nothing", f"Authorization: Bearer {line_of('a', RIGHT, content=True)[9:]}|"),
    Caller("the right token", "content", BEARER),
    Caller("the right token, in another case", "content", BEARER.replace("Authorization: Bearer", "authorization: bearer")),
    Caller("the right token through a proxy", "content", f"{BEARER}X-Forwarded-For: 10.1.2.3|Via: 1.1 proxy|"),
    Caller("the right token for another name", "content", f"{BEARER}Host: bus.example|"),
    Caller("a token for status", "status", f"Authorization: Bearer {STATUS}|"),
    Caller("a revoked token", "nothing", f"Authorization: Bearer {REVOKED}|"),
    Caller("a token that a proxy hands on", "nothing", f"X-Forwarded-{BEARER}"),
    Caller("a token for a proxy", "nothing", f"Proxy-{BEARER}"),
    Caller("a token as a cookie", "nothing", f"Cookie: token={RIGHT}; Authorization={RIGHT}|"),
    Caller("a token as a password", "nothing", f"Authorization: Basic {RIGHT}|"),
    Caller("two tokens", "nothing", f"Authorization: Bearer {WRONG}|{BEARER}"),
    Caller("nobody over TLS", "nothing", tls=True),
    Caller("loopback over TLS", "content", local="127.0.0.1", tls=True),
    Caller("a page of another scheme over TLS", "nothing", "Origin: http://localhost|", "127.0.0.1", tls=True),
    Caller("the right token over TLS", "content", BEARER, tls=True),
    Caller("a wrong token over TLS", "nothing", f"Authorization: Bearer {WRONG}|", tls=True),
    Caller("a client certificate", "nothing", tls=True, certificate=True),
    Caller("a certificate in a header", "nothing", "X-Forwarded-Client-Cert: Subject=CN=router-c|X-SSL-Client-Verify: SUCCESS|", tls=True),
    Caller("no TLS where there is TLS", "closed", BEARER, tls=True, plain=True),
]  # fmt: skip


def expected(who: Caller, method: str, path: str, open_: str) -> int:
    if who.may == "closed":
        return 0
    allowed = {"GET"} if path.startswith("/events") else {"GET", "HEAD"}
    if method not in allowed:
        return 405
    if path in STATIC or (path in STATES and open_ == "status"):
        return 200
    return 200 if who.may == "content" or (who.may == "status" and path in STATES) else 403


@pytest.mark.parametrize("open_", ["status", "probes"])
@pytest.mark.parametrize("who", WHO, ids=[who.name for who in WHO])
async def test_every_endpoint_answers_every_caller_according_to_its_rights(
    who: Caller, open_: str, tmp_path: Path, pki: Pki
) -> None:
    async with callers(tmp_path, pki if who.tls else None, http_open=open_) as here:
        assert here.bus.daemon.admin.paths.keys() == {path.partition("?")[0] for path in (*STATIC, *STATES, *CONTENT)}
        certificate = pki.client if who.certificate else None
        methods = METHODS if LONG or not WHO.index(who) % 4 else ("GET", "POST")

        def all_of_them() -> Iterator[str]:
            for path, method in product((*STATIC, *STATES, *CONTENT), methods):
                answer = here.ask(method, path, who.headers, local=who.local, certificate=certificate, plain=who.plain)
                status = expected(who, method, path, open_)
                shown = path in CONTENT and status == 200 and method != "HEAD"
                shows = any(each in answer.body for each in (str(TOKEN_ID), str(BLOCK), '"matches":[{'))
                if (answer.status, shows) != (status, shown):
                    yield f"{method} {path}: {answer.status} {answer.body[:200]}, not {status}"

        assert await asyncio.to_thread(list, all_of_them()) == []
