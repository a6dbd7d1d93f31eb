"""Tests for HTTP tokens and certificates whose files change while the bus runs, and for secrets that never leave
the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvbus.cli import main
from kvbus.http import connections, content_log
from kvbus.http.credentials import line_of, new_token
from tests.doubles.bus import eventually
from tests.security.certificates import Authority
from tests.security.test_http_principals import (
    BEARER,
    BLOCK,
    CONTENT,
    REMOTE,
    REVOKED,
    RIGHT,
    STATES,
    STATIC,
    STATUS,
    TOKEN_ID,
    WRONG,
    Callers,
    Pki,
    another_machine,
    callers,
    pki,
)

__all__ = ["another_machine", "pki"]


def put(path: Path, data: bytes | str) -> None:
    """Write a file atomically with mode 0600, over an existing file of this name."""
    new = path.with_name("new")
    new.write_bytes(data if isinstance(data, bytes) else data.encode())
    new.chmod(0o600)
    new.rename(path)


async def status(here: Callers, headers: str, **options: Any) -> int:
    lines = headers.replace("|", "\r\n")
    return (await asyncio.to_thread(lambda: here.ask("GET", "/blocks", lines, **options))).status


@contextlib.asynccontextmanager
async def following(here: Callers) -> AsyncIterator[socket.socket]:
    """Open a connection that follows the batches of an output, and wait until its answer has begun."""

    def begin() -> tuple[socket.socket, int]:
        connection = here.connect(REMOTE)
        shown = BEARER.replace("|", "\r\n")
        connection.sendall(f"GET /events?output=routers HTTP/1.1\r\nHost: x\r\n{shown}\r\n".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return connection, answer.status

    connection, status = await asyncio.to_thread(begin)
    with connection:
        assert status == 200
        yield connection


def ends(connection: socket.socket) -> bool:
    """Wait until the server has closed the connection, and return True. A read that times out raises an error."""
    try:
        while connection.recv(65536):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    return True


async def test_a_removed_token_is_refused_and_its_stream_ends(tmp_path: Path) -> None:
    async with callers(tmp_path) as here:
        tokens, counts = tmp_path / "tokens", here.bus.daemon.process.key_reloads
        new = new_token()
        assert await status(here, f"Authorization: Bearer {new}|") == 403
        put(tokens, f"{tokens.read_text()}\n{line_of('router-b', new, content=True)}\n")
        await eventually(lambda: counts["applied"] == 1, "taken over")
        assert await status(here, f"Authorization: Bearer {new}|") == 200
        async with following(here) as stream:  # router-a follows the batches, and then loses its token
            put(tokens, line_of("router-b", new, content=True))
            assert await asyncio.to_thread(ends, stream)
        assert here.bus.daemon.process.http_closed["revoked"] == 1
        assert await status(here, BEARER) == 403
        assert await status(here, f"Authorization: Bearer {new}|") == 200


async def test_a_token_that_loses_its_right_to_content_loses_its_stream(tmp_path: Path) -> None:
    async with callers(tmp_path) as here:
        async with following(here) as stream:
            put(tmp_path / "tokens", line_of("router-a", RIGHT, content=False))
            assert await asyncio.to_thread(ends, stream)
        assert await status(here, BEARER) == 403


@pytest.mark.parametrize("bad", ["", "nonsense", f"a {WRONG}", None], ids=["empty", "nonsense", "a token", "none"])
async def test_a_bad_token_file_changes_no_access_and_ends_no_stream(tmp_path: Path, bad: str | None) -> None:
    async with callers(tmp_path) as here:
        tokens, counts = tmp_path / "tokens", here.bus.daemon.process.key_reloads
        async with following(here) as stream:
            if bad is None:
                tokens.unlink()
            else:
                put(tokens, bad)
            await eventually(lambda: counts["refused"] == 1, "refused")
            assert await status(here, BEARER) == 200
            assert await status(here, f"Authorization: Bearer {WRONG}|") == 403
            stream.settimeout(30)
            assert await asyncio.to_thread(stream.recv, 1)


async def serial(here: Callers, authority: Authority) -> str:
    """Return the serial number of the certificate that the server presents on a new connection."""

    def look() -> str:
        context = ssl.create_default_context(cafile=authority.certificate)
        with (
            socket.create_connection(here.address, 30) as connection,
            context.wrap_socket(connection, server_hostname="127.0.0.1") as secured,
        ):
            return str((secured.getpeercert() or {})["serialNumber"])

    return await asyncio.to_thread(look)


async def test_a_new_certificate_is_used_without_ending_streams(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    async with callers(tmp_path, pki) as here:
        counts, first = here.bus.daemon.process.key_reloads, await serial(here, pki.authority)
        async with following(here) as stream:
            put(pki.server.key, b"nonsense")  # the change is incomplete: the certificate is still the old one
            await eventually(lambda: counts["refused"] == 1, "refused")
            assert await serial(here, pki.authority) == first
            new = pki.authority.issue("new")
            put(pki.server.key, new.key.read_bytes())
            put(pki.server.certificate, new.certificate.read_bytes())
            await eventually(lambda: counts["applied"], "taken over")
            assert await serial(here, pki.authority) != first
            stream.settimeout(30)
            assert await asyncio.to_thread(stream.recv, 1)
        assert here.bus.daemon.process.http_closed["revoked"] == 0


async def test_a_removed_token_is_refused_even_if_the_certificate_is_bad(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    async with callers(tmp_path, pki) as here:
        put(pki.server.certificate, b"nonsense")
        put(tmp_path / "tokens", "# nobody\n")
        await eventually(lambda: here.bus.daemon.process.key_reloads["applied"], "the tokens are")
        assert await status(here, BEARER) == 403


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_the_http_server_accepts_only_tls_1_2_and_1_3(tmp_path: Path, pki: Pki, version: ssl.TLSVersion) -> None:
    async with callers(tmp_path, pki) as here:
        context = ssl.create_default_context(cafile=pki.authority.certificate)
        context.minimum_version = context.maximum_version = version

        def connect() -> str | None:
            with (
                socket.create_connection(here.address, 30) as connection,
                context.wrap_socket(connection, server_hostname="127.0.0.1") as secured,
            ):
                return secured.version()

        assert await asyncio.to_thread(connect) == version.name.replace("_", ".")
        context = here.bus.daemon.admin.credentials.tls.context  # type: ignore[union-attr]
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100])
async def test_a_slow_tls_handshake_is_closed(
    tmp_path: Path, pki: Pki, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus.http.connections.TIMEOUT", 0.3)
    async with callers(tmp_path, pki) as here:
        process, before = here.bus.daemon.process, here.bus.daemon.process.http_closed["slow"]
        peers = [here.connect(REMOTE, plain=True) for _ in range(10)]
        for peer in peers:
            peer.sendall(said)
        for peer in peers:
            assert await asyncio.to_thread(ends, peer)
            peer.close()
        await eventually(lambda: process.http_connections == 0, "all forgotten")
        assert process.http_closed["slow"] + process.http_closed["tls"] - before == 10


async def test_a_probe_is_answered_during_a_flood_of_tls_handshakes(tmp_path: Path, pki: Pki) -> None:
    async with callers(tmp_path, pki) as here:
        process = here.bus.daemon.process
        peers = await asyncio.to_thread(
            lambda: [here.connect(REMOTE, plain=True) for _ in range(3 * connections.MAX_CONNECTIONS)]
        )
        await eventually(lambda: process.http_closed["too_many"] >= 2 * connections.MAX_CONNECTIONS, "closed")
        assert process.http_connections <= connections.MAX_CONNECTIONS
        assert (await asyncio.to_thread(here.ask, "GET", "/livez")).status == 200
        assert process.http_connections <= connections.MAX_CONNECTIONS
        for peer in peers:
            peer.close()
        await eventually(lambda: process.http_connections == 0, "all forgotten")


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"\x16\x03\x01\x00\x05hello"])
async def test_bytes_that_are_not_a_tls_handshake_close_the_connection(
    tmp_path: Path, pki: Pki, garbage: bytes
) -> None:
    async with callers(tmp_path, pki) as here:
        peer = here.connect(REMOTE, plain=True)
        peer.sendall(garbage)
        assert await asyncio.to_thread(ends, peer)
        peer.close()
        assert here.bus.daemon.process.http_closed == {"tls": 1}


async def test_oversize_requests_over_tls_are_refused(tmp_path: Path, pki: Pki) -> None:
    async with callers(tmp_path, pki) as here:
        huge = f"X: {'y' * 100_000}\r\n"
        assert (await asyncio.to_thread(here.ask, "GET", "/livez", huge)).status in {0, 400, 431}
        assert (await asyncio.to_thread(here.ask, "GET", "/livez")).status == 200


def test_tokens_tls_and_reloads_work_on_uvloop(tmp_path: Path, pki: Pki) -> None:
    async def run() -> None:
        async with callers(tmp_path, pki) as here:
            assert await status(here, BEARER) == 200
            assert await status(here, "") == 403
            peer = here.connect(REMOTE, plain=True)
            peer.sendall(b"nonsense")
            assert await asyncio.to_thread(ends, peer)
            peer.close()
            async with following(here) as stream:
                put(tmp_path / "tokens", "# nobody\n")
                assert await asyncio.to_thread(ends, stream)
            closed = here.bus.daemon.process.http_closed
            assert (closed["tls"], closed["revoked"], closed["slow"]) == (1, 1, 0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def test_every_read_of_content_is_logged_with_its_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_log, "EVERY", 0.0)
    caplog.set_level(logging.INFO)
    async with callers(tmp_path) as here:
        size = len((await asyncio.to_thread(here.ask, "GET", "/blocks", BEARER.replace("|", "\r\n"))).body)
        await asyncio.to_thread(here.ask, "GET", "/blocks", "", local="127.0.0.1")
        await asyncio.to_thread(here.ask, "GET", CONTENT[-1], BEARER.replace("|", "\r\n"))
        await asyncio.to_thread(here.ask, "GET", "/blocks?source=nobody", BEARER.replace("|", "\r\n"))

        def read() -> set[tuple[str, str, int, int]]:
            lines = [vars(each) for each in caplog.records if each.name == "kvbus.http.content"]
            return {(line["caller"], line["path"], line["status"], line["blocks"]) for line in lines if line["bytes"]}

        everything = {("router-a", "/blocks", 200, 1), ("loopback", "/blocks", 200, 1), ("router-a", "/events", 200, 1), ("router-a", "/blocks", 404, 0)}  # fmt: skip
        await eventually(lambda: read() >= everything, "written")
        assert size in {vars(each).get("bytes") for each in caplog.records}


async def test_answers_and_logs_contain_no_token_and_no_secret(
    tmp_path: Path, pki: Pki, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    async with callers(tmp_path, pki) as here:
        config = here.bus.daemon.config
        parts = []
        for token, path in product((RIGHT, STATUS, WRONG, REVOKED), (*STATIC, *STATES, *CONTENT, "/nowhere")):
            answer = await asyncio.to_thread(here.ask, "GET", path, f"Authorization: Bearer {token}\r\n")
            parts.append(answer.body)
        put(tmp_path / "tokens", f"a {WRONG}\n")
        put(tmp_path / "new.key", pki.server.key.read_bytes())
        await eventually(lambda: here.bus.daemon.process.key_reloads["refused"], "refused")
        file = tmp_path / "kvbus.yaml"
        file.write_text(config.to_yaml())
    for arguments in (["check", "-c", str(file)], ["check", "--json", "-c", str(file)], ["check", "-c", "/nowhere"]):
        with pytest.raises(SystemExit):
            main(arguments)
    shown = "".join(parts) + caplog.text + "".join(capsys.readouterr())
    assert "http_tokens_file" in shown
    secrets = [pki.server.key.read_text().splitlines()[1]]
    for token in (RIGHT, STATUS, WRONG, REVOKED):
        secrets += [token, token.removeprefix("kvbus_"), line_of("a", token, content=True).rpartition(":")[2]]
    assert [secret for secret in secrets if secret in shown] == []
    assert not re.search("sha256:[0-9a-f]", shown)
    logged = caplog.text
    assert str(TOKEN_ID) not in logged
    assert str(BLOCK) not in logged
