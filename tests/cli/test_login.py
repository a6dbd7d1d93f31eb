"""Tests for kvbus commands that query another kvbus over HTTP, with a bearer token and over https."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvbus.cli import main
from kvbus.cli.login import login
from kvbus.common.errors import ConfigError
from kvbus.config import load
from kvbus.tools.doctor.examine import examine
from tests.ports import free_port
from tests.security.test_http_principals import RIGHT, WRONG, Pki, callers


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(autouse=True)
def nobody_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.http.access.is_loopback", lambda _host: False)


def run(work: Callable[[asyncio.Event], Any]) -> None:
    asyncio.run(work(asyncio.Event()))


async def invoke(*args: object, **env: str) -> Result:
    """Run the command in a thread, so that the bus in this event loop can answer it."""
    return await asyncio.to_thread(CliRunner().invoke, main, [str(each) for each in args], env=env)


async def test_top_and_doctor_send_a_token_and_check_the_certificate(
    tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("top", "doctor"):
        monkeypatch.setattr(f"kvbus.cli.{name}.run_until_signal", run)
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(f"{RIGHT}\n")
    wrong.write_text(WRONG)
    async with callers(tmp_path, pki, http_open="probes") as here:
        bus = ("--http", f"https://127.0.0.1:{here.address[1]}")
        ca = ("--http-ca", pki.authority.certificate)
        for command in (("top", "--plain", "--count", 1), ("doctor",)):
            done = await invoke(*command, *bus, *ca, "--http-token-file", right)
            assert done.exit_code == 0, done.output
            done = await invoke(*command, *bus, KVBUS_CA_FILE=str(ca[1]), KVBUS_TOKEN_FILE=str(right))
            assert done.exit_code == 0, done.output
            done = await invoke(*command, *bus, *ca, "--http-token-file", wrong)
            assert done.exit_code in {1, 69}
            assert "the bearer token is not valid" in done.output
            assert WRONG not in done.output
            done = await invoke(*command, *bus, "--http-token-file", right)
            assert done.exit_code in {1, 69}
            assert "name its authority with --http-ca" in done.output


async def test_doctor_recognizes_the_bus_of_its_configuration_by_the_certificate(
    tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    async with callers(tmp_path, pki, http=f"127.0.0.1:{port}") as here:
        report = await examine(here.bus.daemon.config, timeout=5)
        assert report.findings == []
        other = pki.authority.issue("other")
        files = {"http_tls_certificate_file": other.certificate, "http_tls_key_file": other.key}
        config = load(None, env={}, overrides={**here.bus.daemon.config.to_dict(), **files})
        assert "is not valid" in (await examine(config, timeout=5)).findings[0].text


def test_a_token_or_certificate_file_that_is_unusable_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("", "two\nlines", "b\x00d", "ä"):
        file = tmp_path / "token"
        file.write_text(text)
        with pytest.raises(ConfigError, match="holds no token"):
            login("https://a", file, None)
        with pytest.raises(ConfigError, match="holds no certificate"):
            login("https://a", None, file)
    with pytest.raises(ConfigError, match="No such file"):
        login("https://a", tmp_path / "nothing", None)
    file.write_text(RIGHT)
    for url, said in (("http://10.0.0.7:1", True), ("https://10.0.0.7:1", False), ("http://127.0.0.1:1", False)):
        assert login(url, file, None).token == RIGHT
        assert ("unencrypted" in capsys.readouterr().err) == said
    assert RIGHT not in repr(login("https://a", file, None))


@pytest.mark.usefixtures("nobody_is_local")
def test_the_environment_variables_of_the_login_are_not_configuration_keys() -> None:
    env = {"KVBUS_TOKEN_FILE": "a", "KVBUS_CA_FILE": "b"}
    given = {"sources": [{"endpoint": "ipc:///e"}], "outputs": [{"endpoint": "ipc:///o"}]}
    load(None, env=env, overrides=given)
